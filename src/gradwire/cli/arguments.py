"""Types of arguments that commands share: what they may be, and how they are written."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter
from cyclopts.validators import Number

Jobs = Annotated[int | None, Parameter(validator=Number(gte=1))]
Json = Annotated[Path | None, Parameter(name="--json")]
Methods = Annotated[list[str] | None, Parameter(name="--method", negative=())]
Positive = Annotated[int, Parameter(validator=Number(gte=1))]
Values = Annotated[int, Parameter(validator=Number(gte=0, lte=10**9))]
Natural = Annotated[int, Parameter(validator=Number(gte=0))]
Dataset = Literal["auto", "fashion-mnist", "digits", "cifar10", "imagenet"]
WorkloadName = Literal["image", "resnet20", "resnet9", "vgg16", "alexnet", "language", "lstm", "gpt", "ncf", "unet"]
Segments = Literal["one", "resnet"]
TunedWorkload = Literal["image", "gpt", "language"]
