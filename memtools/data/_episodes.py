"""H5Episodes: episodes of a robot, or of any process in time, in HDF5 files.

    item i ──► (episode, frame) ──► blocks of frames ──► ByteCache ──► h5py, one file handle each
                                    │ as many frames as a chunk of the file holds,
                                    └ or as fit in 64 KiB where it has no chunks

HDF5 reads and unpacks whole chunks. So what is read at once is kept at once: the cache holds
blocks, and a block is never smaller than a chunk.
"""

from __future__ import annotations

import bisect
import errno
import importlib
import itertools
import os
import re
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memtools._base import torch as bridge
from memtools._base.mapping import file_of
from memtools._base.notice import notice
from memtools._base.number import any_whole_number, repr_of, whole_number
from memtools._base.size import format_bytes
from memtools._base.text import count, shown
from memtools._budget import Budget
from memtools.data._cache import ByteCache

if TYPE_CHECKING:
    import torch

BLOCK_BYTES = 64 * 2**10  # The size of a block where the file has no chunks.
MOST_OPEN = 16  # A process keeps at most this many files open.
SMALL_FRAME = 4096  # Bytes. Chunks of several smaller frames are not reported.


@dataclass(frozen=True)
class ChunkLayout:
    """The layout of an HDF5 dataset's frames."""

    #: the dataset in the file
    path: str
    #: the file
    file: str
    #: 1 without chunks
    frames_per_chunk: int
    #: in memory
    frame_bytes: int
    #: its name
    compression: str | None
    #: of a frame
    shape: tuple[int, ...]

    @property
    def chunk_bytes(self) -> int:
        """A chunk in memory."""
        return self.frames_per_chunk * self.frame_bytes

    @property
    def remedy(self) -> str:
        """The command that rewrites a file with one frame per chunk."""
        chunk = "x".join(map(str, (1, *self.shape)))
        return f"h5repack -l {self.path}:CHUNK={chunk} {self.file} new.hdf5"

    def __str__(self) -> str:
        held = self.frames_per_chunk
        if held == 1:
            return f"{self.path}: frames are read one by one ({format_bytes(self.frame_bytes)})"
        return (
            f"{self.path}: a chunk holds {held} frames: reading one reads {held} "
            f"({format_bytes(self.chunk_bytes)}); write files with chunks={(1, *self.shape)}, or "
            f"{self.remedy}"
        )


class H5Episodes:
    """A map-style data set over the frames of HDF5 episodes: an observation and the next actions.

        episodes = H5Episodes("episodes", chunk=20, cache="256 MiB")
        loader = DataLoader(episodes, batch_size=8, shuffle=True, num_workers=2)

    An item is a dict of tensors: each observation by its path, the actions `[chunk, ...]`, and
    `"is_pad"`, True for actions after the end of the episode, which repeat the last one. The
    defaults are the layout of ACT and ALOHA. A process opens files when it reads them, at most 16,
    and has its own cache.

    Args:
        files: a folder of `.hdf5` and `.h5` files, in the order of the numbers in their names; or
            the path of a file, or of several.
        chunk: actions of an item.
        observations: paths of the datasets to read. None: all below `observations/`.
        actions: the path of the actions; None leaves them out.
        cache: bytes that a process keeps, or like `"256 MiB"`; a Budget; a ByteCache; None for no
            cache. `"auto"`: the limit of `ByteCache()`.
        decode: functions by path that turn a stored frame (such as JPEG) into an array or a tensor,
            which is cached.

    Raises ImportError without h5py; ValueError if there is no file, or a file lacks a dataset or
    has different lengths; OSError if a file cannot be read.
    """

    def __init__(
        self,
        files: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
        *,
        chunk: int = 1,
        observations: Sequence[str] | None = None,
        actions: str | None = "action",
        cache: int | str | Budget | ByteCache | None = "auto",
        decode: Mapping[str, Callable[[Any], Any]] | None = None,
    ) -> None:
        chunk = whole_number("chunk", chunk)
        if isinstance(observations, str):
            raise TypeError(
                "observations must be a sequence of paths, got a str; put it into a list"
            )
        if not isinstance(decode, Mapping | None):
            raise TypeError(
                f"decode must be a dict of functions by path, got {type(decode).__name__}"
            )
        named = [] if observations is None else list(observations)
        asked = named if actions is None else [*named, actions]
        wrong: list[object] = [path for path in asked if not isinstance(path, str)]
        wrong += [function for function in (decode or {}).values() if not callable(function)]
        if wrong:
            raise TypeError(
                "observations and actions are paths in the file and decode functions by path, got "
                f"{type(wrong[0]).__name__}"
            )
        self._paths = _files_of(files)
        self._files = _Files()
        self._chunk, self._actions = chunk, actions
        self._decode = dict(decode or {})
        first = self._open(0)
        if observations is None:
            named = _below(first, "observations")
        #: the datasets of an observation
        self.observations: tuple[str, ...] = tuple(named)
        #: the same, with the actions
        self.keys = (*self.observations, *([] if actions is None else [actions]))
        if not self.keys:
            raise ValueError(
                shown(
                    f"{self._paths[0]} has no dataset below observations/; pass observations=, the "
                    f"paths of those to read: it has {_names(_below(first, ''))}"
                )
            )
        unknown = sorted(set(self._decode) - set(self.keys))
        if unknown:
            raise ValueError(
                f"decode names {unknown[0]!r}, which is not one of {_names(self.keys)}"
            )
        lengths, self._frames = list[int](), list[dict[str, int]]()
        for i in range(len(self._paths)):
            lengths.append(self._length(i))
            self._frames.append({path: self._frames_of(i, path) for path in self.keys})
        self._lengths, self._ends = tuple(lengths), tuple(itertools.accumulate(lengths))
        self._cache = _cache_of(cache)
        self._check_chunks()
        self.close()

    # --- the files ---

    def _open(self, episode: int) -> Any:
        return self._files.open(self._paths[episode])

    def _dataset(self, episode: int, path: str) -> Any:
        """The h5py dataset of a path, in the file of an episode."""
        file = self._open(episode)
        found = file.get(path)
        if found is None or not hasattr(found, "shape"):
            has = _names(_below(file, ""))
            raise ValueError(shown(f"{self._paths[episode]} has no dataset {path!r}; it has {has}"))
        if not found.shape:
            raise ValueError(
                shown(f"{path} in {self._paths[episode]} is one value; a frame has an index")
            )
        return found

    def _length(self, episode: int) -> int:
        """How many frames an episode has."""
        found = {path: int(self._dataset(episode, path).shape[0]) for path in self.keys}
        (first, length), *others = found.items()
        for path, other in others:
            if other != length:
                raise ValueError(
                    shown(
                        f"{self._paths[episode]} has {length} frames of {first} and {other} of "
                        f"{path}; an episode has as many of each"
                    )
                )
        if length == 0:
            raise ValueError(shown(f"{self._paths[episode]} has no frames; leave it out"))
        return length

    def _frames_of(self, episode: int, path: str) -> int:
        """How many frames a block of a dataset has. Not all files need have the same chunks."""
        layout = self._layout(episode, path)
        if path in self._decode:
            return 1
        if self._dataset(episode, path).chunks is not None:
            return layout.frames_per_chunk
        return max(1, BLOCK_BYTES // max(1, layout.frame_bytes))

    def _layout(self, episode: int, path: str) -> ChunkLayout:
        found = self._dataset(episode, path)
        shape = tuple(int(n) for n in found.shape[1:])
        frame_bytes = int(found.dtype.itemsize)
        for n in shape:
            frame_bytes *= n
        held, file = 1 if found.chunks is None else int(found.chunks[0]), str(self._paths[episode])
        return ChunkLayout(path, file, held, frame_bytes, found.compression, shape)

    def layouts(self) -> list[ChunkLayout]:
        """Return the layout of each dataset in the first file. `print` shows what reading a frame
        reads, and the remedy."""
        return [self._layout(0, path) for path in self.keys]

    def _check_chunks(self) -> None:
        """Warn of images of which reading one reads many, where the cache cannot hold them."""
        frames = sum(self._lengths)
        for layout in (self._layout(0, path) for path in self.observations):
            everything = frames * layout.frame_bytes
            limit = 0 if self._cache is None else self._cache.limit
            fits = limit is None or everything <= limit
            if layout.frames_per_chunk > 1 and layout.frame_bytes >= SMALL_FRAME and not fits:
                notice(f"{layout}; all frames are {format_bytes(everything)}")

    def close(self) -> None:
        """Close this process's files until it reads again."""
        self._files.close()

    # --- the frames ---

    @property
    def num_episodes(self) -> int:
        """Episodes in all files."""
        return len(self._paths)

    @property
    def lengths(self) -> tuple[int, ...]:
        """Frames of each episode."""
        return self._lengths

    @property
    def files(self) -> tuple[str, ...]:
        """Paths, one per episode."""
        return tuple(map(str, self._paths))

    @property
    def cache(self) -> ByteCache | None:
        """This process's cache."""
        return self._cache

    def __len__(self) -> int:
        return self._ends[-1]

    def locate(self, index: int) -> tuple[int, int]:
        """Return the episode of a frame, and its index there.

        Raises IndexError if `index` is out of range; -1 is the last frame.
        """
        index = any_whole_number("index", index)
        frame = index + len(self) if index < 0 else index
        if not 0 <= frame < len(self):
            raise IndexError(
                f"index must be below {len(self):,}, the number of frames, got {repr_of(index)}"
            )
        episode = bisect.bisect_right(self._ends, frame)
        return episode, frame - self._ends[episode] + self._lengths[episode]

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return self.at(*self.locate(index))

    def at(self, episode: int, start: int) -> dict[str, torch.Tensor]:
        """Return the item of frame `start` of an `episode`.

        Raises IndexError if there is none; OSError or ValueError if its file has changed.
        """
        episode = any_whole_number("episode", episode)
        start = any_whole_number("start", start)
        if not 0 <= episode < self.num_episodes:
            raise IndexError(f"episode must be below {self.num_episodes}, got {repr_of(episode)}")
        length = self._lengths[episode]
        if not 0 <= start < length:
            frames = f"{length}, the frames of the episode"
            raise IndexError(f"start must be below {frames}, got {repr_of(start)}")
        item = {path: self._rows(episode, path, start, start + 1)[0] for path in self.observations}
        if self._actions is not None:
            torch = bridge.connect().torch
            stop = min(length, start + self._chunk)
            rows, missing = (
                self._rows(episode, self._actions, start, stop),
                start + self._chunk - stop,
            )
            if missing:
                rows = torch.cat([rows, rows[-1:].expand(missing, *rows.shape[1:])])
            item[self._actions] = rows
            item["is_pad"] = torch.arange(self._chunk) >= stop - start
        return item

    def _rows(self, episode: int, path: str, start: int, stop: int) -> torch.Tensor:
        """The frames from `start` to `stop` of a dataset, as a tensor with its own memory."""
        torch, held = bridge.connect().torch, self._frames[episode][path]
        parts = []
        for number in range(start // held, (stop - 1) // held + 1):
            block = self._block(episode, path, number)
            begin = number * held
            parts.append(block[max(0, start - begin) : stop - begin])
        if len(parts) == 1:
            return parts[0].clone()
        return torch.cat(parts)  # type: ignore[no-any-return]

    def _block(self, episode: int, path: str, number: int) -> torch.Tensor:
        """A block of frames, out of the cache or of the file. It is shared: not to be changed."""
        key = (episode, path, number)
        block = None if self._cache is None else self._cache.get(key)
        if block is None:
            block = self._read(episode, path, number * self._frames[episode][path])
            if self._cache is not None:
                self._cache.put(key, block)
        return block

    def _read(self, episode: int, path: str, start: int) -> torch.Tensor:
        torch, length = bridge.connect().torch, self._lengths[episode]
        file, found = self._paths[episode], self._dataset(episode, path)
        if found.shape[0] != length:
            raise ValueError(
                shown(
                    f"{file} has {found.shape[0]} frames of {path} and had {length} when the data "
                    "set was made; make it again"
                )
            )
        stop = min(length, start + self._frames[episode][path])
        try:
            values = found[start:stop]
        except OSError as error:
            raise OSError(
                shown(
                    f"{file}: frames {start} to {stop - 1} of {path} cannot be read ({error}); it "
                    "is damaged: copy or record it again"
                )
            ) from error
        if path in self._decode:
            try:
                return torch.as_tensor(self._decode[path](values[0]))[None]  # type: ignore[no-any-return]
            except Exception as error:
                error.add_note(f"memtools: raised by decode, for frame {start} of {path} in {file}")
                raise
        if not values.dtype.isnative:  # torch has numbers in the order of bytes of the machine only
            values = values.astype(values.dtype.newbyteorder("="))
        try:
            return torch.from_numpy(values)  # type: ignore[no-any-return]
        except TypeError as error:
            raise ValueError(
                shown(
                    f"{path} in {file} is of {found.dtype}, which is not a number to torch; pass a "
                    "function for it in decode"
                )
            ) from error

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_files": _Files()}  # a worker opens its own

    def __repr__(self) -> str:
        episodes, frames = count(self.num_episodes, "episode"), count(len(self), "frame")
        return f"H5Episodes({episodes}, {frames}, chunk={self._chunk})"


#: Files whose descriptor the program has closed: HDF5 would close the file that has its number now.
_NOT_OURS: list[Any] = []


class _Files:
    """The file handles of one process, those that were used last."""

    def __init__(self) -> None:
        self._open: OrderedDict[Path, _OpenFile] = OrderedDict()
        self._pid = os.getpid()

    def open(self, path: Path) -> Any:
        """The h5py.File of a path."""
        if self._pid != os.getpid():  # HDF5 would read by what the parent had open, too
            self.close()
            self._pid = os.getpid()
        file = self._open.pop(path, None)
        if file is None:
            file = _OpenFile(path)
            while len(self._open) >= MOST_OPEN:
                self._open.popitem(last=False)[1].close()
        self._open[path] = file
        return file.get()

    def close(self) -> None:
        """Close what is open here. What the parent of this process has open stays open there."""
        while self._open:
            self._open.popitem()[1].close()

    def __del__(self) -> None:
        if not sys.is_finalizing():
            self.close()


class _OpenFile:
    """An h5py.File, and the file that its descriptor meant. HDF5 reads whatever has the number."""

    __slots__ = ("_file", "_meant", "_path")

    def __init__(self, path: Path) -> None:
        self._file, self._path = _open_file(path), path
        found = path.stat()  # HDF5 takes up a file that it has open already, with its descriptor
        self._meant = found.st_dev, found.st_ino

    def _is_own(self) -> bool:
        return file_of(self._file.id.get_vfd_handle()) == self._meant

    def get(self) -> Any:
        """The h5py.File. Raises OSError if the program has closed its descriptor."""
        if not self._is_own():
            why = "the program has closed the descriptor by which HDF5 reads it (os.closerange?)"
            raise OSError(errno.EBADF, f"{why}; read it in a new process", str(self._path))
        return self._file

    def close(self) -> None:
        """Close the file, unless the program has taken its number: it stays as it is then."""
        if self._is_own():
            self._file.close()
        else:
            _NOT_OURS.append(self._file)


def _open_file(path: Path) -> Any:
    try:
        h5py = importlib.import_module("h5py")
    except ImportError as error:
        raise ImportError(
            f"H5Episodes reads HDF5 by h5py ({error}); run python -m pip install h5py"
        ) from error
    if not path.is_file():
        raise FileNotFoundError(shown(f"{path} does not exist; an episode is a file"))
    try:
        return h5py.File(path, "r", rdcc_nbytes=0)  # HDF5's own cache would not be counted
    except OSError as error:
        if error.errno is not None:  # such as a file that may not be read, or is being written
            raise type(error)(error.errno, os.strerror(error.errno), str(path)) from error
        why = re.sub(r"^.*\((.*)\)$", r"\1", str(error))
        raise OSError(
            shown(
                f"{path} cannot be opened as HDF5 ({why}); it is damaged or cut short: copy or "
                "record it again"
            )
        ) from error


def _files_of(files: Any) -> list[Path]:
    """The paths of the episodes, in order."""
    if isinstance(files, str | os.PathLike):
        path = Path(files)
        if not path.is_dir():
            return [path]
        found = [p for p in path.iterdir() if p.suffix in (".hdf5", ".h5")]
        if not found:
            raise ValueError(shown(f"{path} has no file that ends in .hdf5 or .h5"))
        return sorted(found, key=lambda p: ([int(n) for n in re.findall(r"\d+", p.stem)], p.name))
    if not isinstance(files, Iterable) or isinstance(files, bytes):
        raise TypeError(f"files must be a path or a sequence of paths, got {type(files).__name__}")
    paths = [Path(file) for file in files]
    if not paths:
        raise ValueError("files is empty; pass a folder, or the path of each episode")
    return paths


def _cache_of(cache: Any) -> ByteCache | None:
    if cache is None or isinstance(cache, ByteCache):
        return cache
    return ByteCache(None if cache == "auto" else cache, name="H5Episodes")


def _below(group: Any, prefix: str) -> list[str]:
    """The paths of all datasets below a group of a file, in order of their names."""
    found: list[str] = []

    def note(name: str, item: Any) -> None:
        if hasattr(item, "shape") and name.startswith(f"{prefix}/" if prefix else ""):
            found.append(name)

    group.visititems(note)
    return found


def _names(paths: Sequence[str]) -> str:
    return ", ".join(paths[:12]) + (", ..." if len(paths) > 12 else "") or "none"
