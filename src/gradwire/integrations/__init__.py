"""Other people's trainers: Accelerate, Transformers, Lightning and Fabric, Ray Train.

Each module needs the package it is named after, and nothing else in gradwire imports any of them.
"""

from gradwire.integrations.attachment import Attachment

__all__ = ["Attachment"]
