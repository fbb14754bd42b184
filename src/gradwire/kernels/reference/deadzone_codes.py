"""The codes of gaps and levels: canonical Huffman codes, one for each activity, fixed once and for all.

Their weights are what gradients of three small models asked for, a CNN, a GRU and a transformer, each at three times of
its training and ten steps of the quantiser. Of a model that was left out when they were made they took 2 to 6 % more
than codes of its own would, between 0.02 and 6 bits a value, tables that such codes would have to send left out; and
fewer than the entropy of the levels of each layer by itself, because large values of a gradient lie close together.
"""

from __future__ import annotations

import heapq
from functools import lru_cache
from math import isqrt
from typing import Any, NamedTuple

import numpy as np

from gradwire.layout import Int64Array

CONTEXTS = 24
"""Codes, by how active the values before were."""

QUIETEST = -15
"""The activity of the first one: the mean class of levels less that of gaps."""

LEVEL_BITS = 5

LEVEL_CLASSES = 1 << LEVEL_BITS
"""A symbol is the class of a gap times this, plus that of a level."""

RAW = LEVEL_CLASSES - 1
"""The class of a value that is sent as a float32."""

ESCAPE = 64 * LEVEL_CLASSES
"""The symbol after which 11 bits say which symbol was meant."""

ESCAPED_BITS = 11

LONGEST = 12
"""Bits of a code at most."""

CHEAP = 23
"""Half bits from which on a pair of classes has no code of its own."""

_NONE = 46

GAP_COSTS = (
    "8cdc9ba9b9a8889899a9bbccddddgdfeeizjzzg",
    "8cdb9aa9a998879899a9bbdcddfdgegfelzlzzi",
    "8dba9aa8a8a8889899aaccdeeceefhhghzzzzzh",
    "7bba89a8a8978898aaabdcdeedgfgkhklzzzzze",
    "8aa98898978898a9babcedefdghhjihzzkzzznim",
    "89988897988898a9bcebeeeegijjlmnllzzzzjzh",
    "89a88887878899bbdcfcffgdhjkmlmzzzzzm",
    "7998778787889abcecgehfjfginmnlnnzzzj",
    "788777778799bbddfehhhhikknkmkzzzzzmzzzl",
    "6887667788aaccefhhiikjkkmzl",
    "5776667799bceegihhjjklkmmzzzzzzn",
    "56756688abeeghiiljzlnzln",
    "456577aadehhjjkkzlznm",
    "356689cehimklzzzzn",
    "2477bdhjnzznn",
    "158afjnzzzzzzzzzzzzzzzzzzzzzzzzzzzn",
    "16adk",
    "06ch",
    "07ek",
    "08gm",
    "09h",
    "09j",
    "0ak",
    "0al",
)
"""Half bits of the class of a gap in each context, in base 36: ``z``, and what is not there, has no code."""

LEVEL_COSTS = (
    "0aggm",
    "0ahi",
    "0bgl",
    "0bgm",
    "0bk",
    "0bk",
    "0bmn",
    "0ajm",
    "0ajk",
    "0akl",
    "0ajm",
    "09hk",
    "08fj",
    "06cgm",
    "148bhl",
    "2467bejn",
    "445579dgm",
    "5565669bgj",
    "66756578bejn",
    "788665668afi",
    "8997756578bejn",
    "9aa88665669bgjn",
    "bbb997756578ceijn",
    "cccaa886756688bcfhkn",
)
"""The same of levels."""


class Codes(NamedTuple):
    """Codes for all contexts.

    Attributes:
        lengths: ``uint8[CONTEXTS, ESCAPE + 1]``: bits that a symbol takes, those after an escape included.
        words: ``uint32[CONTEXTS, ESCAPE + 1]``: these bits, the first one lowest.
        taken: ``uint8[CONTEXTS, ESCAPE]``: bits that a value takes whose symbol it is, with all that follows that.
        symbols: ``uint16[CONTEXTS, 2**LONGEST]``: by the next bits, the symbol that is next, plus ``2**12`` times the
            length of its code.
    """

    lengths: np.ndarray[Any, np.dtype[np.uint8]]
    words: np.ndarray[Any, np.dtype[np.uint32]]
    taken: np.ndarray[Any, np.dtype[np.uint8]]
    symbols: np.ndarray[Any, np.dtype[np.uint16]]


@lru_cache(maxsize=1)
def codes() -> Codes:
    """Made when the first gradient comes."""
    made = Codes(
        np.zeros((CONTEXTS, ESCAPE + 1), np.uint8),
        np.zeros((CONTEXTS, ESCAPE + 1), np.uint32),
        np.zeros((CONTEXTS, ESCAPE), np.uint8),
        np.zeros((CONTEXTS, 2**LONGEST), np.uint16),
    )
    for context, costs in enumerate(zip(GAP_COSTS, LEVEL_COSTS, strict=True)):
        lengths = _lengths(_weights(*costs))
        code = before = 0
        for length, symbol in sorted((length, symbol) for symbol, length in lengths.items()):
            code <<= length - before
            before = length
            word = int(f"{code:0{length}b}"[::-1], 2)
            made.lengths[context, symbol], made.words[context, symbol] = length, word
            made.symbols[context, word :: 1 << length] = symbol | length << LONGEST
            code += 1
        escape, bits = int(made.words[context, ESCAPE]), lengths[ESCAPE]
        for symbol in np.flatnonzero(made.lengths[context] == 0).tolist():
            made.lengths[context, symbol], made.words[context, symbol] = bits + ESCAPED_BITS, escape | symbol << bits
    gap, level = np.divmod(np.arange(ESCAPE), LEVEL_CLASSES)
    made.taken[:] = made.lengths[:, :ESCAPE] + _low_bits(gap) + np.where(level == RAW, 32, _low_bits(level) + 1)
    return made


def _low_bits(classes: Int64Array) -> Int64Array:
    """How many bits say which number of a class it is."""
    widths: Int64Array = np.maximum((classes + 1 >> 1) - 1, 0)
    return widths


def _weights(gaps: str, levels: str) -> dict[int, int]:
    """How often symbols come, relative to one another: ``2**(-cost / 2)``; an escape as often as all without a code."""
    weights, rest = {}, 0
    for gap in range(64):
        for level in range(LEVEL_CLASSES):
            cost = _cost(gaps, gap) + _cost(levels, level)
            weight = isqrt(1 << max(_NONE - cost, 0))
            if cost <= CHEAP:
                weights[gap * LEVEL_CLASSES + level] = weight
            else:
                rest += weight
    return {**weights, ESCAPE: max(rest, isqrt(1 << _NONE - CHEAP))}


def _cost(costs: str, number: int) -> int:
    return int(costs[number], 36) if number < len(costs) else _NONE


def _lengths(weights: dict[int, int]) -> dict[int, int]:
    """Huffman's: the two lightest are joined until one is left, of equal ones those that came first."""
    lengths = dict.fromkeys(weights, 0)
    heap = [(weight, number, [symbol]) for number, (symbol, weight) in enumerate(weights.items())]
    heapq.heapify(heap)
    for number in range(len(heap), 2 * len(heap) - 1):
        lightest, next_lightest = heapq.heappop(heap), heapq.heappop(heap)
        joined = lightest[2] + next_lightest[2]
        for symbol in joined:
            lengths[symbol] += 1
        heapq.heappush(heap, (lightest[0] + next_lightest[0], number, joined))
    return lengths
