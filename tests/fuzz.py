"""Lies to methods and decoders for as long as one likes: ``python tests/fuzz.py --seconds 600``.

With atheris installed, inputs follow the coverage of routes, codecs and the reference kernels, which decode everything
beside the compiled ones; else they are drawn at random. Every input is a few bytes: whom to lie to, in which answer,
and how to spoil it, as in `tests/hostile.py`, which also has the laws. An input that breaks one is written to
``--findings``, named after its hash, and ``--replay FILE`` runs it again, with the same ``--methods``; so is the input
at work when the process is killed by a signal, under the name ``last``. An exit status other than 0 says that there
were findings.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import random
import sys
import time
import traceback
from collections import Counter
from pathlib import Path
from typing import Any

HEAD = 4
"""Bytes of an input before its program."""

SEEDS = 300
"""Random inputs that atheris starts from."""

FOLLOWED = ["adaptive", "codec", "index", "kernels.reference", "memory", "methods", "quantize", "routes", "select"]
FOLLOWED += ["sketch", "sparse", "transform", "wire"]


class Fuzzer:
    """Runs inputs, and counts them.

    Args:
        names: Methods to lie to.
        findings: Where inputs that break a law go.
        decoders: Whether to spoil payloads of compiled decoders only, a thousand a second.
    """

    def __init__(self, names: list[str], findings: Path, decoders: bool = False) -> None:
        import torch

        from gradwire import methods
        from hostile import decodings, named_decodings, victims

        torch.set_num_threads(1)
        chosen = names or methods.names()
        self._targets: list[Any] = [] if names else list(named_decodings())
        for name in chosen:
            self._targets += [*decodings(name), *([] if decoders else victims(name))]
        self._only_compiled = decoders
        self._findings = findings
        self._findings.mkdir(parents=True, exist_ok=True)
        self._last = (findings / "last").open("wb", buffering=0)
        self.counts: Counter[str] = Counter()
        self.broken: Counter[str] = Counter()
        self.started = time.monotonic()

    def run(self, content: bytes) -> None:
        """Lies once."""
        from hostile import Decoding

        self._last.seek(0)
        self._last.write(content)
        self._last.truncate()
        content = content.ljust(HEAD, b"\0")
        target = self._targets[int.from_bytes(content[:2], "little") % len(self._targets)]
        number, program = int.from_bytes(content[2:HEAD], "little"), content[HEAD:]
        decodes = isinstance(target, Decoding)
        try:
            accepted = target.check(program, self._only_compiled) if decodes else target.check(number, program)
        except Exception as error:
            self.counts["broken"] += 1
            place = traceback.extract_tb(error.__traceback__)[-1]
            what = f"{type(error).__name__}: {error} ({Path(place.filename).name}:{place.lineno})"
            self.broken[what] += 1
            if self.broken[what] == 1:
                name = hashlib.sha256(content).hexdigest()[:16]
                (self._findings / name).write_bytes(content)
                traceback.print_exc()
                print(f"finding {name}: {what}", flush=True)
        else:
            kind = "payloads" if decodes else "answers"
            self.counts[f"{kind} {'accepted' if accepted else 'refused'}"] += 1

    def report(self) -> str:
        """What was done so far."""
        seconds = time.monotonic() - self.started
        counts = ", ".join(f"{count:,} {kind}" for kind, count in sorted(self.counts.items()))
        return f"{sum(self.counts.values()):,} lies in {seconds:.0f} s to {len(self._targets):,} targets: {counts}"


def made(draw: random.Random) -> bytes:
    """A random input; some make another shape of an answer."""
    shape = draw.randrange(256) if draw.random() < 0.05 else 0
    return draw.randbytes(HEAD) + bytes([shape]) + draw.randbytes(4 * draw.randrange(1, 7))


def drawn(seconds: float, fuzzer: Fuzzer, seed: int) -> None:
    """Random inputs."""
    draw = random.Random(seed)
    said = fuzzer.started
    while (now := time.monotonic()) < fuzzer.started + seconds:
        fuzzer.run(made(draw))
        if now > said + 60:
            said = now
            print(fuzzer.report(), flush=True)


def followed(seconds: float, names: list[str], findings: Path, seed: int) -> None:
    """Inputs that atheris makes from what earlier ones reached; it ends the process."""
    import atheris

    with atheris.instrument_imports(include=[f"gradwire.{each}" for each in FOLLOWED]):
        fuzzer = Fuzzer(names, findings)
    ended = [False]

    def one(content: bytes) -> None:
        if time.monotonic() < fuzzer.started + seconds:
            fuzzer.run(content)
        elif not ended[0]:
            ended[0] = True
            print(fuzzer.report(), flush=True)
            if fuzzer.broken:
                raise AssertionError(f"{len(fuzzer.broken)} findings in {findings}")

    corpus = findings / "corpus"
    corpus.mkdir(exist_ok=True)
    draw = random.Random(seed)
    for number in range(SEEDS):
        (corpus / f"seed-{number}").write_bytes(made(draw))
    limits = [
        f"-seed={seed + 1}",
        f"-max_total_time={int(seconds) + 2}",
        "-max_len=64",
        "-len_control=0",
        "-timeout=60",
    ]
    atheris.Setup([sys.argv[0], str(corpus), f"-artifact_prefix={findings}/", "-print_final_stats=1", *limits], one)
    atheris.Fuzz()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--methods", nargs="*", default=[], help="all by default")
    parser.add_argument("--findings", type=Path, default=Path("fuzz-findings"))
    parser.add_argument("--random", action="store_true", help="do not follow coverage, even where atheris is installed")
    parser.add_argument("--decoders", action="store_true", help="random payloads for compiled decoders only, many more")
    parser.add_argument("--replay", type=Path, help="one input to run again")
    options = parser.parse_args()
    random_only = options.random or options.decoders
    if options.replay is None and not random_only and importlib.util.find_spec("atheris") is not None:
        followed(options.seconds, options.methods, options.findings, options.seed)
    fuzzer = Fuzzer(options.methods, options.findings, options.decoders)
    if options.replay is not None:
        fuzzer.run(options.replay.read_bytes())
    else:
        drawn(options.seconds, fuzzer, options.seed)
    print(fuzzer.report())
    return 1 if fuzzer.broken else 0


if __name__ == "__main__":
    sys.exit(main())
