"""Types of arguments that commands share: what they may be, and how they are written."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter, Token
from cyclopts.validators import Number


def _can_be_written(kind: object, path: Path | None) -> None:
    """Raises ValueError now, and not after minutes of measuring, if nothing can be written there."""
    if path is None:
        return
    there = next(each for each in (path.absolute(), *path.absolute().parents) if each.exists())
    if not os.access(there, os.W_OK) or not (there.is_dir() or there == path.absolute()):
        raise ValueError(f"{there} cannot be written to; choose another path")


def _whole(kind: object, tokens: Sequence[Token]) -> int:
    """A whole number, however written, as 1e6 is; else 1.5 workers would be two."""
    with suppress(ArithmeticError):
        if -(2**63) < (number := Decimal(tokens[0].value)) < 2**63 and number == number.to_integral_value():
            return int(number)
    raise ValueError(f"{tokens[0].value!r} is not a whole number below 2**63; give one, such as 4")


def _is_no_folder(kind: object, path: Path | None) -> None:
    """Raises ValueError where a file is asked for."""
    if path is not None and path.is_dir():
        raise ValueError("It is a folder; name a file.")


def _is_no_file(kind: object, path: Path | None) -> None:
    """Raises ValueError where a folder is asked for."""
    if path is not None and path.exists() and not path.is_dir():
        raise ValueError("It is a file; name a folder.")


def _is_a_picture(kind: object, path: Path | None) -> None:
    """Raises ValueError unless a picture of that name can be drawn."""
    if path is not None and path.suffix not in (".png", ".svg", ".pdf"):
        raise ValueError("Its name must end in .png, .svg or .pdf.")


def shown(default: object) -> str | None:
    """A default as help shows it: several as they are typed, nothing for what is not given."""
    if isinstance(default, list):
        return " ".join(map(str, default))
    return None if default in (None, False, "") else str(default)


OutputFolder = Annotated[Path, Parameter(validator=(_is_no_file, _can_be_written))]
OutputFile = Annotated[Path, Parameter(validator=(_is_no_folder, _can_be_written))]
OutputPicture = Annotated[Path, Parameter(validator=(_is_no_folder, _can_be_written, _is_a_picture))]
Json = Annotated[Path | None, Parameter(name="--json", validator=(_is_no_folder, _can_be_written))]
Flag = Annotated[bool, Parameter(negative=())]
Filters = Annotated[list[str] | None, Parameter(name="--only", negative=())]
Jobs = Annotated[int | None, Parameter(converter=_whole, validator=Number(gte=1))]
Methods = Annotated[list[str] | None, Parameter(name="--method", negative=())]
Positive = Annotated[int, Parameter(converter=_whole, validator=Number(gte=1))]
Values = Annotated[int, Parameter(converter=_whole, validator=Number(gte=0, lte=10**9))]
Natural = Annotated[int, Parameter(converter=_whole, validator=Number(gte=0))]
Whole = Annotated[int, Parameter(converter=_whole)]
Device = Literal["cpu", "cuda"]
Backend = Literal["gloo", "nccl"]
Dataset = Literal["auto", "fashion-mnist", "digits", "cifar10", "imagenet"]
WorkloadName = Literal["image", "resnet20", "resnet9", "vgg16", "alexnet", "language", "lstm", "gpt", "ncf", "unet"]
Segments = Literal["one", "resnet"]
TunedWorkload = Literal["image", "alexnet", "resnet20", "gpt", "language"]
