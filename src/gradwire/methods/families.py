"""The catalogue by what methods send."""

from __future__ import annotations

from collections.abc import Mapping

FAMILIES: Mapping[str, tuple[str, ...]] = {
    "plain averages": ("dense", "fp16", "bf16"),
    "one bit a value": ("efsignsgd", "blocksgdm", "onebit", "signsgd", "signum", "lion", "lioncub"),
    "a few bits": (
        "qsgd",
        "nuqsgd",
        "alq",
        "amq",
        "globalqsgd",
        "intsgd",
        "terngrad",
        "natural",
        "3lc",
        "eightbit",
        "inceptionn",
        "thc",
        "eden",
        "qgz",
        "sdp4bit",
        "loco",
    ),
    "k coordinates": (
        "topk",
        "randomk",
        "gspar",
        "dgc",
        "ef21",
        "ef21sgdm",
        "dryden",
        "sbc",
        "sketchml",
        "sketchedsgd",
        "scalecom",
        "gtopk",
        "oktopk",
        "demo",
    ),
    "as few bits as you ask for": ("deadzone", "subspace", "dithered"),
    "as many as the data asks for": (
        "threshold",
        "adaptive",
        "gaussiank",
        "sidco",
        "adacomp",
        "strom",
        "variance",
        "hybrid",
    ),
    "low rank": ("powersgd", "acpsgd", "atomo", "gradiveq", "greedylore", "dion"),
}
"""Names by family, simple ones first."""

OTHERS = "registered by you"


def family_of(name: str) -> str:
    """The family of a method; :data:`OTHERS` if it is in none."""
    return next((family for family, names in FAMILIES.items() if name in names), OTHERS)
