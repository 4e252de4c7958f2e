"""A store of objects, through fsspec: listed and read, with every request tried again as `Retries` says."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import datetime
from typing import Any, TypeVar
from urllib.parse import urlsplit, urlunsplit

from gpupipe.errors import BackendUnavailable, ConfigError, SourceError
from gpupipe.forks import reset_in_children
from gpupipe.remote.counters import Counters
from gpupipe.remote.retries import GaveUp, Retries

T = TypeVar("T")

# In this order: what says most about the content comes first.
_VERSIONS = ("ETag", "etag", "generation", "md5Hash", "md5", "content_md5", "checksum", "crc32c")
_TIMES = ("mtime", "LastModified", "last_modified", "Last-Modified", "updated", "modified", "created")
_S3 = ("s3", "s3a")
_EXTRAS = {"s3": "s3", "s3a": "s3", "http": "http", "https": "http", "gs": "gcs", "gcs": "gcs"}


@dataclass(frozen=True, slots=True)
class Entry:
    """What a store says of an object or a folder.

    Attributes:
        path: In the store, as fsspec names it.
        size: In bytes; None where the store does not say, and for folders.
        version: Changes with the content: its ETag, or whatever the store has; "" where it has nothing.
        is_folder: Whether it is one.
    """

    path: str
    size: int | None
    version: str
    is_folder: bool = False

    @property
    def name(self) -> str:
        """The last part of the path."""
        return self.path.rstrip("/").rpartition("/")[2]


class Store:
    """What a URL leads to.

    Threads: any number. Processes: fsspec's file systems do not work in a forked child (their event loop runs in a
    thread of the parent), so each process makes its own; pickled are the URL and the options.

    Args:
        url: Any that fsspec takes: ``s3://bucket/train``, ``https://...``, ``file:///...``.
        options: To fsspec. They may be secrets, and appear in no message.
        retries: How requests are tried.
        counters: Where they are counted.

    Attributes:
        root: The path of the URL in the store.
        etag_is_md5: Whether an ETag that looks like an MD5 is taken for that of the content; until one proves to be
            none.
        uri: The URL without user, password and query, for messages.

    Raises:
        BackendUnavailable: A package that this kind of URL needs is not installed.
        ConfigError: There is no such kind of URL, or the options do not fit it.

    Source: https://filesystem-spec.readthedocs.io/en/latest/async.html
    """

    def __init__(
        self, url: str, options: Mapping[str, Any] | None, retries: Retries | None, counters: Counters
    ) -> None:
        self._url, self._options = url, dict(options or {})
        self.retries, self.counters = retries or Retries(), counters
        self.uri = shown(url)
        self.etag_is_md5 = True
        self.reset()
        reset_in_children(self)
        _, self.root = self._make()

    def __repr__(self) -> str:
        return f"Store({self.uri!r})"

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in ("_made", "_making")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.reset()
        reset_in_children(self)

    def reset(self) -> None:
        """Make the file system anew: in a forked child."""
        self._made: Any = None
        self._making = threading.Lock()

    def _make(self) -> tuple[Any, str]:
        protocol = self._url.partition("://")[0].rpartition("::")[2]
        try:
            from fsspec.core import url_to_fs
        except ImportError as error:
            raise BackendUnavailable(
                f"{self.uri!r} cannot be opened: the package fsspec is missing. Install it: "
                "pip install 'gpupipe[remote]'",
                missing="fsspec",
                install="pip install 'gpupipe[remote]'",
            ) from error
        try:
            # A listing that fsspec remembers would hide what has changed; an instance that it remembers would be
            # shared with whoever else uses the same store, and closed with it.
            options = {**self._options, **_defaults(protocol, self._options)}
            made, root = url_to_fs(self._url, skip_instance_cache=True, use_listings_cache=False, **options)
        except ImportError as error:
            extra = _EXTRAS.get(protocol)
            install = f"pip install 'gpupipe[{extra}]'" if extra else f"the package that fsspec asks for: {error}"
            raise BackendUnavailable(
                f"{self.uri!r} cannot be opened: a package for {protocol}:// is missing. Install {install}",
                missing=protocol,
                install=install,
            ) from error
        except (TypeError, ValueError) as error:
            # `from None`: the error may print the options.
            raise ConfigError(
                f"{self.uri!r} cannot be opened with storage_options that have "
                f"{', '.join(sorted(self._options)) or 'nothing'}: fsspec says {type(error).__name__}. See that it "
                f"knows {protocol}://, and what options it takes",
                field="storage_options",
                value=sorted(self._options),
                allowed="those of fsspec's file system for this URL",
            ) from None
        if protocol in _S3 and "retries" not in self._options:
            made.retries = 1
        return made, root

    def _fs(self) -> Any:
        if self._made is None:
            with self._making:
                if self._made is None:
                    self._made = self._make()[0]
        return self._made

    def url(self, path: str) -> str:
        """The URL of a path, for messages and keys."""
        return shown(str(self._fs().unstrip_protocol(path)))

    def path_of(self, url: str) -> str:
        """The path of a URL of this store."""
        return str(self._fs()._strip_protocol(url))

    def local_path(self) -> str | None:
        """Where it is, for a store on this machine's file system; else None."""
        protocols = self._fs().protocol
        protocols = (protocols,) if isinstance(protocols, str) else protocols
        return self.root if "file" in protocols else None

    # --- requests ---

    def listing(self, path: str) -> list[Entry]:
        """What is directly in a folder, sorted by path.

        Raises:
            SourceError: It cannot be listed.
        """
        found = self._call("cannot be listed", path, lambda fs, limit: _run(fs, "ls", limit, path, detail=True))
        own = path.rstrip("/")
        entries = (_entry(info) for info in found)
        # Object stores list the marker of a folder in itself.
        return sorted((e for e in entries if e.path.rstrip("/") != own), key=lambda entry: entry.path)

    def glob(self, pattern: str) -> list[str]:
        """The paths that match a pattern, sorted."""
        return sorted(self._call("cannot be listed", pattern, lambda fs, limit: _run(fs, "glob", limit, pattern)))

    def info(self, path: str) -> Entry:
        """What the store says of an object.

        Raises:
            SourceError: There is none, or it does not answer.
        """
        return _entry(self._call("cannot be found", path, lambda fs, limit: _run(fs, "info", limit, path)), path)

    def read(self, path: str, start: int, end: int | None) -> bytes:
        """Bytes of an object, exactly as many as asked for.

        Args:
            path: Of the object.
            start: Of the first byte.
            end: Behind the last one; None is the whole object, whatever its size.

        Raises:
            SourceError: It cannot be read; names the object, the number of tries, and what went wrong last.
        """
        if end is not None and end <= start:
            return b""

        def attempt(fs: Any, limit_s: float) -> bytes:
            limits = {} if end is None else {"start": start, "end": end}
            data: bytes = _run(fs, "cat_file", limit_s, path, **limits)
            self.counters.add(fetched_bytes=len(data))
            if end is not None and len(data) != end - start:
                if len(data) > end - start:
                    raise OSError(f"{len(data)} bytes came instead of {end - start}: it does not answer byte ranges")
                what = f"{len(data)} bytes came instead of {end - start}"
                if not start and _entry(_run(fs, "info", limit_s, path)).size == len(data):
                    raise ValueError(f"{what}: it is of another size now")  # which no further try changes
                raise OSError(what)
            return data

        return self._call("cannot be read", path, attempt)

    def _call(self, what: str, path: str, attempt: Callable[[Any, float], T]) -> T:
        def counted(limit_s: float) -> T:
            self.counters.add(requests=1)
            return attempt(self._fs(), limit_s)

        try:
            return self.retries.call(counted, lambda: self.counters.add(retries=1))
        except GaveUp as failed:
            url = self.url(path)
            remedy = (
                "See that it is there"
                if failed.missing
                else "See that the store can be reached and lets you read it; gpupipe.Retries sets how long it is tried"
            )
            raise SourceError(f"{url!r} {what}: {failed}. {remedy}", uri=url, missing=failed.missing) from failed.cause


def _defaults(protocol: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """What a file system gets unless the user says otherwise: `Retries` alone is to try again, and to count it."""
    if protocol not in _S3:
        return {}
    given = dict(options.get("config_kwargs") or {})
    given.setdefault("retries", {"total_max_attempts": 1})
    return {"config_kwargs": given}


def _run(fs: Any, method: str, limit_s: float, *arguments: Any, **keywords: Any) -> Any:
    """Call a method of a file system, for so long at most."""
    if getattr(fs, "async_impl", False):
        from fsspec.asyn import sync

        return sync(fs.loop, getattr(fs, f"_{method}"), *arguments, timeout=limit_s, **keywords)
    if type(fs).__module__.startswith("fsspec.implementations.") and type(fs).__name__ in (
        "LocalFileSystem",
        "MemoryFileSystem",
    ):
        return getattr(fs, method)(*arguments, **keywords)  # as safe from hanging as any disk
    # What has no time limit of its own is left behind in a thread when it hangs.
    future: Future[Any] = Future()

    def work() -> None:
        try:
            future.set_result(getattr(fs, method)(*arguments, **keywords))
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=work, name="gpupipe-request", daemon=True).start()
    return future.result(limit_s)


def _entry(info: Mapping[str, Any], path: str | None = None) -> Entry:
    name = str(info["name"]) if path is None else path
    is_folder = info.get("type") == "directory"
    size = info.get("size")
    return Entry(name, None if size is None or is_folder else int(size), _version(info), is_folder)


def _version(info: Mapping[str, Any]) -> str:
    for name in (*_VERSIONS, *_TIMES):
        value = info.get(name)
        if value:
            if isinstance(value, datetime):
                # fsspec's stores say it in one way in a listing, and in another way of a single object.
                value = value.timestamp()
            # The same object has its ETag in quotes in one answer and without in another.
            return f"{'time' if name in _TIMES else name.lower()}:{str(value).strip(chr(34))}"
    return ""


def shown(url: str) -> str:
    """A URL without what may be secret in it: user, password, and the query of a signed one.

    >>> shown("https://me:secret@host/a/b.tar?signature=abc")
    'https://host/a/b.tar'
    """
    if "@" not in url and "?" not in url:
        return url
    if "://" not in url:
        return url
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https", "ftp", "sftp", "ssh", "smb", "webhdfs", "webdav", "dav"):
        return url  # names of objects may hold both
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))
