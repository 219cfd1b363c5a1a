"""Convert HDF5 episodes to one LMDB database, from which a frame is read without unpacking a chunk.

    python examples/hdf5_to_lmdb.py episodes/ episodes.lmdb
    python examples/hdf5_to_lmdb.py episodes/ episodes.lmdb --keys action observations/qpos

Every frame of every dataset of numbers becomes one record, as it is stored: a row of JPEG bytes
stays one. Datasets of texts, and of rows of different lengths, are named and left out. The database
is written in transactions of some megabytes, which record how far they go. So the same command
continues a conversion that was killed. At the end every frame is read from both sides and compared.

`read_frame` shows how a data set reads it:

    environment = lmdb.open("episodes.lmdb", subdir=False, readonly=True, lock=False)
    with environment.begin() as reading:
        episode = read_episode(reading, 3)
        image = read_frame(reading, 3, episode, "observations/images/top", 120)
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import h5py
import lmdb
import numpy as np

MIB = 1 << 20
VERSION = 1


class ConversionError(Exception):
    """What stops a conversion, in one sentence."""


class Place(NamedTuple):
    """How far the database goes: the next frame to be written."""

    episode: int
    key: int  # the number of the dataset in the file
    frame: int


# --- the database -------------------------------------------------------------------------------


def name_of(episode: int, path: str, frame: int) -> bytes:
    return f"{episode:06}/{path}/{frame:08}".encode()


def read_episode(reading: lmdb.Transaction, episode: int) -> dict[str, Any]:
    """What the database says of an episode: its file, frames, and dtype and shape by dataset."""
    found = reading.get(f"{episode:06}".encode())
    if found is None:
        raise KeyError(f"the database has no episode {episode}")
    described: dict[str, Any] = json.loads(bytes(found))
    return described


def read_frame(
    reading: lmdb.Transaction, number: int, episode: dict[str, Any], path: str, frame: int
) -> np.ndarray[Any, Any]:
    """A frame, as an array with its own memory."""
    dtype, shape = episode["datasets"][path]
    stored = reading.get(name_of(number, path, frame))
    if stored is None:
        raise KeyError(f"the database has no frame {frame} of {path} in episode {number}")
    return np.frombuffer(stored, dtype).reshape(shape).copy()


# --- the episodes -------------------------------------------------------------------------------


def files_of(source: Path) -> list[Path]:
    if not source.is_dir():
        raise ConversionError(f"{source} is not a folder of episodes")
    found = [path for path in source.iterdir() if path.suffix in (".hdf5", ".h5")]
    if not found:
        raise ConversionError(f"{source} has no file that ends in .hdf5 or .h5")
    return sorted(found, key=lambda path: ([int(n) for n in re.findall(r"\d+", path.stem)], path))


def open_file(path: Path) -> h5py.File:
    try:
        return h5py.File(path, "r")
    except OSError as error:
        raise ConversionError(f"{path} cannot be opened as HDF5: {error}") from error


def datasets_of(path: Path, keys: list[str] | None) -> dict[str, tuple[str, tuple[int, ...], int]]:
    """(dtype, shape of a frame, frames) of each dataset that has frames."""
    found: dict[str, tuple[str, tuple[int, ...], int]] = {}
    left_out: list[str] = []
    with open_file(path) as file:

        def note(name: str, item: object) -> None:
            if isinstance(item, h5py.Dataset) and item.shape:
                if item.dtype.hasobject:
                    left_out.append(name)
                else:
                    found[name] = (item.dtype.str, tuple(item.shape[1:]), item.shape[0])

        file.visititems(note)
    kind = "texts, objects, or rows of different lengths"
    for key in keys or []:
        if key in left_out:
            raise ConversionError(f"{key} in {path} holds {kind}, which are not converted")
        if key not in found:
            raise ConversionError(f"{path} has no dataset {key!r}; it has {', '.join(found)}")
    if not found:
        raise ConversionError(f"{path} has no dataset of numbers with frames; move it elsewhere")
    if left_out and not keys:
        print(f"left out of {path.name}: {', '.join(left_out)}, which hold {kind}", file=sys.stderr)
    return {name: found[name] for name in keys or sorted(found)}


def bytes_of(datasets: dict[str, tuple[str, tuple[int, ...], int]]) -> int:
    sizes = (np.dtype(dtype).itemsize * frames * int(np.prod(shape, dtype=np.int64))
             for dtype, shape, frames in datasets.values())  # fmt: skip
    return sum(sizes)


# --- the conversion -----------------------------------------------------------------------------


class Conversion:
    """One conversion: what is to be written, how far it is, and the transaction that is open."""

    def __init__(
        self, source: Path, target: Path, keys: list[str] | None, commit_bytes: int
    ) -> None:
        self.files = files_of(source)
        self.target, self.commit_bytes = target, commit_bytes
        self.datasets = [datasets_of(path, keys) for path in self.files]
        self.total = sum(map(bytes_of, self.datasets))
        self.done = 0  # bytes that were written or verified, of those that are to be
        self.committed = 0  # bytes that are in the database, whatever happens now
        self._shown = 0.0

    def open(self, map_size: int | None) -> lmdb.Environment:
        """The database; the place where it is kept grows as it is written, up to `map_size`."""
        frames = sum(of[2] for datasets in self.datasets for of in datasets.values())
        size = map_size or int(1.1 * self.total) + 8192 * frames + 16 * MIB
        return lmdb.open(str(self.target), map_size=size, subdir=False, max_dbs=0)

    def plan(self) -> str:
        """What makes it another conversion: files with size and time, and datasets."""
        files = [[p.name, p.stat().st_size, p.stat().st_mtime_ns] for p in self.files]
        return json.dumps([VERSION, files, [sorted(of) for of in self.datasets]])

    def begin(self, environment: lmdb.Environment) -> Place:
        """Return the place to continue at: the beginning of an empty database."""
        plan = self.plan().encode()
        with environment.begin(write=True) as writing:
            found = writing.get(b"plan")
            if found is None and environment.stat()["entries"]:
                raise ConversionError(
                    f"{self.target} has records that are not of this script; give another name"
                )
            if found is not None and found != plan:
                raise ConversionError(
                    f"{self.target} was begun from other files or datasets; remove it, or give "
                    "another name"
                )
            writing.put(b"plan", plan)
            place = Place(*json.loads(writing.get(b"place") or b"[0, 0, 0]"))
        self.done = sum(map(bytes_of, self.datasets[: place.episode]))
        if place.episode < len(self.files):
            datasets = list(self.datasets[place.episode].items())
            self.done += bytes_of(dict(datasets[: place.key]))
            (name, (dtype, shape, _)) = datasets[place.key]
            self.done += bytes_of({name: (dtype, shape, place.frame)})
        self.committed = self.done
        return place

    def frames_from(self, place: Place) -> Iterator[tuple[Place, str, np.ndarray[Any, Any]]]:
        """Each frame that is not in the database, and where it stands."""
        for episode in range(place.episode, len(self.files)):
            with open_file(self.files[episode]) as file:
                names = list(self.datasets[episode])
                for key in range(place.key if episode == place.episode else 0, len(names)):
                    stored, step = file[names[key]], block_of(file[names[key]])
                    first = place.frame if (episode, key) == place[:2] else 0
                    for begin in range(first - first % step, stored.shape[0], step):
                        for number, frame in enumerate(read_block(stored, begin, step), begin):
                            if number >= first:
                                yield Place(episode, key, number), names[key], frame

    def run(self, environment: lmdb.Environment) -> None:
        """Write what is missing."""
        place, size = self.begin(environment), 0
        writing = environment.begin(write=True)
        try:
            for at, path, frame in self.frames_from(place):
                for episode in range(place.episode, at.episode):
                    self.describe(writing, episode)
                if size >= self.commit_bytes:
                    self.commit(writing, at)
                    writing, size = environment.begin(write=True), 0
                place, stored = at, frame.tobytes()
                writing.put(name_of(at.episode, path, at.frame), stored)
                size, self.done = size + len(stored), self.done + len(stored)
            for episode in range(place.episode, len(self.files)):
                self.describe(writing, episode)
            self.commit(writing, Place(len(self.files), 0, 0))
        except BaseException:
            writing.abort()
            raise

    def describe(self, writing: lmdb.Transaction, episode: int) -> None:
        datasets = self.datasets[episode]
        described = {
            "file": self.files[episode].name,
            "frames": {path: frames for path, (_, _, frames) in datasets.items()},
            "datasets": {path: [dtype, shape] for path, (dtype, shape, _) in datasets.items()},
        }
        writing.put(f"{episode:06}".encode(), json.dumps(described).encode())

    def commit(self, writing: lmdb.Transaction, following: Place) -> None:
        """Make what was written last, together with how far it goes."""
        writing.put(b"place", json.dumps(following).encode())
        writing.commit()
        self.committed = self.done
        self.show("written")

    def verify(self, environment: lmdb.Environment) -> int:
        """Compare each frame with its file; returns how many there are."""
        count, self.done = 0, 0
        with environment.begin() as reading:
            for at, path, frame in self.frames_from(Place(0, 0, 0)):
                stored = reading.get(name_of(at.episode, path, at.frame))
                if stored is None or stored != frame.tobytes():
                    state = "is missing" if stored is None else "differs"
                    raise ConversionError(
                        f"frame {at.frame} of {path} of {self.files[at.episode].name} {state} in "
                        f"{self.target}; remove it and convert again"
                    )
                count, self.done = count + 1, self.done + len(stored)
                self.show("verified")
        return count

    def show(self, what: str) -> None:
        """A line of progress, at most one in half a second, and the last one."""
        now = time.monotonic()
        if now - self._shown < 0.5 and self.done < self.total:
            return
        self._shown = now
        share = 100 * self.done / max(1, self.total)
        end = "\r" if sys.stdout.isatty() and self.done < self.total else "\n"
        line = f"{what}: {self.done / MIB:,.1f} of {self.total / MIB:,.1f} MiB ({share:.0f} %)"
        print(line, end=end, flush=True)


def block_of(stored: h5py.Dataset) -> int:
    """Frames to be read at once: those of a chunk, of which HDF5 reads all for any of them."""
    if stored.chunks is not None:
        return int(stored.chunks[0])
    frame = int(stored.dtype.itemsize) * int(np.prod(stored.shape[1:], dtype=np.int64))
    return max(1, MIB // max(1, frame))


def read_block(stored: h5py.Dataset, begin: int, step: int) -> np.ndarray[Any, Any]:
    try:
        block: np.ndarray[Any, Any] = stored[begin : begin + step]
    except OSError as error:
        raise ConversionError(
            f"frames from {begin} on of {stored.name} in {stored.file.filename} cannot be read: "
            f"{error}"
        ) from error
    return block


def convert(
    source: Path,
    target: Path,
    keys: list[str] | None = None,
    *,
    map_size: int | None = None,
    commit_bytes: int = 16 * MIB,
) -> int:
    """Convert, or continue a conversion, and verify. Returns the number of frames in the database.

    Raises ConversionError with one sentence; what was written before stays, and counts.
    """
    conversion = Conversion(source, target, keys, commit_bytes)
    try:
        with conversion.open(map_size) as environment:
            conversion.run(environment)
            return conversion.verify(environment)
    except lmdb.MapFullError as error:
        raise ConversionError(
            f"{target} is full at its map size; give a larger --map-mib, and it goes on"
        ) from error
    except (lmdb.InvalidError, lmdb.VersionMismatchError) as error:
        raise ConversionError(f"{target} is not a database of LMDB; give another name") from error
    except (lmdb.Error, OSError) as error:
        raise ConversionError(
            f"{target} cannot be written: {error}; {conversion.committed / MIB:,.1f} MiB are "
            "there: make room, or mend what it says, and give the same command again"
        ) from error


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("source", type=Path, help="the folder of the HDF5 files")
    parser.add_argument("target", type=Path, help="the database, one file and a lock file")
    parser.add_argument("--keys", nargs="+", help="only these datasets; all by default")
    parser.add_argument("--map-mib", type=int, help="the most that the database may take")
    parser.add_argument("--commit-mib", type=int, default=16, help="of a transaction (16)")
    options = parser.parse_args()
    for name in ("map_mib", "commit_mib"):
        if getattr(options, name) is not None and getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1")
    try:
        frames = convert(
            options.source,
            options.target,
            options.keys,
            map_size=options.map_mib and options.map_mib * MIB,
            commit_bytes=options.commit_mib * MIB,
        )
    except ConversionError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"{frames:,} frames are in {options.target}, and equal those of the files")
    return 0


if __name__ == "__main__":
    sys.exit(main())
