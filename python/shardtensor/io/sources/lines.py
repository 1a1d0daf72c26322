"""Files made of lines of text. Where a row stands nobody knows before lines are
counted: each rank counts those of its part of the file, and all get all counts. From
then on a rank reads the blocks that hold its rows."""

from __future__ import annotations

import bisect
import codecs
import re
import warnings
from collections.abc import Iterator, Sequence

import numpy

from shardtensor.io.sources.source import Box, Source, rows_of_box
from shardtensor.io.sources.stored_bytes import File

BLOCK = 1 << 20  # bytes of whole lines that are counted together
_NEWLINE = 10
_IS_SPACE = numpy.zeros(256, bool)
_IS_SPACE[list(b" \t\r\n\v\f")] = True
_COMMENT = re.compile(rb"#[^\n]*")


def without_comments(text: bytes) -> bytes:
    """Without what stands behind # in a line."""
    return _COMMENT.sub(b"", text)


class Lines:
    """Lines and their words, found at once by NumPy."""

    def __init__(self, text: bytes, space: bytes = b""):
        """`space`: characters that count as space beside the usual ones."""
        text = text.removeprefix(codecs.BOM_UTF8)
        if text and not text.endswith(b"\n"):
            text += b"\n"
        self.text = numpy.frombuffer(text, numpy.uint8)
        self.ends = numpy.flatnonzero(self.text == _NEWLINE)
        self.begins = numpy.concatenate([[0], self.ends[:-1] + 1])[: len(self.ends)]
        is_space = _IS_SPACE[self.text]
        for character in space:
            is_space |= self.text == character
        before = numpy.concatenate([[True], is_space[:-1]])
        self.begins_word = ~is_space & before
        self.words = numpy.flatnonzero(self.begins_word)
        self._first = numpy.searchsorted(self.words, self.begins)
        self.counts = numpy.searchsorted(self.words, self.ends) - self._first
        self.is_space = is_space

    def starts_with(self, word: bytes) -> numpy.ndarray:
        """Lines whose first word is this one."""
        return self.stands_at(self.word(0), word)

    def stands_at(
        self, places: numpy.ndarray, word: bytes, any_case: bool = False
    ) -> numpy.ndarray:
        """Whether the word that begins at each place is this one, of small letters
        where `any_case` counts."""
        found = numpy.ones(len(places), bool)
        for index, character in enumerate(word):
            there = self._at(places + index)
            found &= (there | 0x20 if any_case else there) == character
        after = numpy.minimum(places + len(word), len(self.text) - 1)
        return found & self.is_space[after]

    def word(self, index: int) -> numpy.ndarray:
        """Where each line's word begins, the line's end where there is none."""
        known = numpy.append(self.words, len(self.text))
        place = known[numpy.minimum(self._first + index, len(self.words))]
        return numpy.where(self.counts > index, place, self.ends)

    def _at(self, places):
        return self.text[numpy.minimum(places, len(self.text) - 1)]

    def numbers(
        self, lines: numpy.ndarray, dtype, skipped: int, width: int, up_to: bytes = b""
    ) -> numpy.ndarray:
        """(len(lines), width) from words of these lines, without the first
        `skipped` ones, each up to a character of `up_to`."""
        edges = numpy.zeros(len(self.text) + 1, numpy.int8)
        edges[self.word(skipped)[lines]] += 1
        edges[self.ends[lines]] -= 1
        kept = numpy.cumsum(edges[:-1], dtype=numpy.int8).astype(bool) & ~self.is_space
        for character in up_to:
            kept &= ~self._after(character)
        text = numpy.where(kept, self.text, ord(" ")).astype(numpy.uint8).tobytes()
        found = _parsed(text, dtype)
        if len(found) != len(lines) * width:
            # Slowly, for this names what is no number.
            found = numpy.array(text.split(), dtype)
        found = found.reshape(len(lines), width)
        if found.dtype.kind == "i":
            self._check_bounds(found, text, lines)
        return found

    def _check_bounds(self, found, text, lines):
        """What is beyond a dtype has been parsed as its last number."""
        limits = numpy.iinfo(found.dtype)
        last = numpy.argwhere((found == limits.min) | (found == limits.max))
        words = text.split() if len(last) else []
        for row, column in last.tolist():
            word = words[row * found.shape[1] + column].decode()
            if int(word) != found[row, column]:
                line = slice(self.begins[lines[row]], self.ends[lines[row]])
                told = self.text[line][:80].tobytes().decode("latin-1").strip()
                raise ValueError(
                    f"the number {word} is beyond {found.dtype}, in the line {told!r}"
                )

    def _after(self, character):
        """Where the character stands before, in the same word, or here."""
        places = numpy.arange(len(self.text))
        word = numpy.maximum.accumulate(numpy.where(self.begins_word, places, 0))
        marks = numpy.where(self.text == character, places, -1)
        return numpy.maximum.accumulate(marks) >= word


def _parsed(text, dtype):
    """As far as these are numbers; some versions of NumPy warn there, some raise."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", DeprecationWarning)
        try:
            return numpy.fromstring(text.decode("latin-1"), dtype, sep=" ")
        except (DeprecationWarning, ValueError):
            return numpy.empty(0, dtype)


class LineFile:
    """Rows of several kinds, one or more lines each. A subclass says of which kind a
    line is, and what else it wants to know of a block."""

    KINDS: Sequence[str] = ()
    EXTRA: Sequence[str] = ()  # what a block is asked beside

    def __init__(self, file: File):
        self._file = file

    def lines(self, text: bytes) -> Lines:
        return Lines(text)

    def kinds(self, lines: Lines) -> numpy.ndarray:
        """For each line the place of its kind in KINDS, -1 for none."""
        raise NotImplementedError

    def extra(self, lines: Lines, kinds: numpy.ndarray) -> list[int]:
        return []

    # ---- counting -----------------------------------------------------------

    def count(self, part: int, parts: int) -> tuple[int, numpy.ndarray]:
        """The file's size, and of the lines that begin in this part of it a row for
        each block: where it begins, how many lines of each kind, what `extra` says.
        """
        size = self._file.size
        begin, end = (self._line_begin(size * p // parts) for p in (part, part + 1))
        rows = []
        while begin < end:
            after = self._line_begin(min(begin + BLOCK, end))
            lines = self.lines(self._file.read(begin, after))
            kinds = self.kinds(lines)
            counts = numpy.bincount(kinds[kinds >= 0], minlength=len(self.KINDS))
            rows.append([begin, *counts.tolist(), *self.extra(lines, kinds)])
            begin = after
        width = 1 + len(self.KINDS) + len(self.EXTRA)
        return size, numpy.array(rows, numpy.int64).reshape(len(rows), width)

    def _line_begin(self, place):
        """The first line that begins at this byte or later."""
        place = max(place - 1, 0) if place else 0
        if place == 0:
            return 0
        while place < self._file.size:
            window = self._file.read_up_to(place, place + 256)
            if (end := window.find(b"\n")) >= 0:
                return place + end + 1
            place += len(window)
        return self._file.size

    def found(self, counts: Sequence[tuple[int, numpy.ndarray]]) -> None:
        """What all parts have."""
        sizes = {size for size, _ in counts} | {self._file.size}
        if len(sizes) > 1:
            raise ValueError(
                "the file has changed, or is another one on some rank: it has "
                f"{sorted(sizes)} bytes"
            )
        table = numpy.concatenate([rows for _, rows in counts])
        self.begins = [*table[:, 0].tolist(), self._file.size]
        self.table = dict(zip((*self.KINDS, *self.EXTRA), table.T[1:], strict=True))
        self._before = {
            kind: [0, *numpy.cumsum(self.table[kind]).tolist()] for kind in self.KINDS
        }

    # ---- reading ------------------------------------------------------------

    def total(self, kind: str) -> int:
        return self._before[kind][-1]

    def blocks(
        self, kind: str, begin: int, end: int
    ) -> Iterator[tuple[int, Lines, numpy.ndarray, numpy.ndarray]]:
        """The blocks that hold lines [begin, end) of a kind: the block, its lines,
        their kinds, and which of them are asked for."""
        before = self._before[kind]
        block = max(bisect.bisect_right(before, begin) - 1, 0)
        while begin < end and before[block] < end:
            lines = self.lines(
                self._file.read(self.begins[block], self.begins[block + 1])
            )
            kinds = self.kinds(lines)
            wanted = numpy.flatnonzero(kinds == self.KINDS.index(kind))
            low = max(begin - before[block], 0)
            yield block, lines, kinds, wanted[low : end - before[block]]
            block += 1

    def before(self, kind: str, block: int) -> int:
        return self._before[kind][block]


class LineSource(Source):
    """A variable of a file of lines, known once they are counted."""

    counted = False

    def __init__(self, file: LineFile):
        super().__init__({})
        self._lines = file

    def count(self, part: int, parts: int) -> object:
        return self._lines.count(part, parts)

    def found(self, counts: Sequence) -> None:
        self._lines.found(counts)
        self.counted = True
        self.resolve()

    def resolve(self) -> None:
        """Sets shape and dtype."""
        raise NotImplementedError

    def rows(self, begin: int, end: int) -> numpy.ndarray:
        raise NotImplementedError

    def read(self, box: Box) -> numpy.ndarray:
        return rows_of_box(self.rows, box)


def joined(parts: Sequence[numpy.ndarray], shape, dtype) -> numpy.ndarray:
    if not parts:
        return numpy.empty((0, *shape[1:]), dtype)
    return numpy.concatenate(parts)
