"""gradwire: data-parallel training, cheap on the wire."""
