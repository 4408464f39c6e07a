"""Opening the log: which log it is, and what is in it. Nothing is deleted that may be needed."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from kimi_runtime.errors import ConfigError
from kimi_runtime.spec.ssd import DIRECT_ALIGN, SsdSpec
from kimi_runtime.umbp.ssdlog import format as on_disk
from kimi_runtime.umbp.ssdlog.disk import LOG_FILE, Disk, SegmentFile, aligned_buffer
from kimi_runtime.umbp.ssdlog.format import FORMAT, LOG_ID_BYTES, Head, Identity, Kind
from kimi_runtime.umbp.ssdlog.ledger import Ledger
from kimi_runtime.umbp.ssdlog.scan import Scan, scan_segment
from kimi_runtime.umbp.ssdlog.segments import Entry, Segment
from kimi_runtime.umbp.ssdlog.volume import Threads, Volume

_logger = logging.getLogger(__name__)

_LARGEST_IDENTITY = 65536


@dataclass(frozen=True, slots=True)
class Recovered:
    """What a start found."""

    segments: int = 0
    sealed: int = 0
    torn_records: int = 0
    damaged_bytes: int = 0
    outdated: int = 0
    """Segments of an older format, which were deleted."""


def open_volume(spec: SsdSpec, disk: Disk, *, new_id: bytes) -> tuple[Volume, Recovered]:
    """Lock the folder, read what is there, and be ready to append to a new segment.

    A log of an older format holds no block that could be checked: it is deleted, and begun anew.

    ConfigError, with every file left as it was: the folder is in use or can't be read, is of a
    newer format, is no one log, or has less room than a log needs.
    """
    try:
        disk.lock()
    except OSError as exc:
        raise _unusable(disk, exc) from exc
    files: dict[int, SegmentFile] = {}
    threads = Threads(spec.io_threads)
    try:
        for number in disk.numbers():
            files[number] = disk.open(number)
        outdated = _drop_outdated(disk, files)
        identity = _identity(spec, disk, files, new_id)
        scans = threads.reads.each(
            lambda n: scan_segment(files[n], identity, n, verify_all=spec.verify_at_start == "all"),
            files,
        )
        volume = _volume(spec, disk, identity, files, threads)
        _fill(volume.ledger, scans, identity.align)
        _fit(volume)
    except BaseException as exc:
        threads.close()
        for file in files.values():
            file.close()
        disk.unlock()
        if isinstance(exc, OSError):
            raise _unusable(disk, exc) from exc
        raise
    torn = sum(len(scan.torn) for scan in scans)
    damaged = sum(scan.damaged_bytes for scan in scans)
    sealed = sum(scan.sealed for scan in scans)
    return volume, Recovered(len(scans), sealed, torn, damaged, outdated)


def _unusable(disk: Disk, exc: OSError) -> ConfigError:
    return ConfigError(
        f"the SSD log in {disk.folder} can't be opened: {exc.strerror or exc}; nothing was "
        f"changed in it; check the folder's disk, its owner and the process's limits"
    )


def _drop_outdated(disk: Disk, files: dict[int, SegmentFile]) -> int:
    """Delete the segments of a log that is of an older format throughout; how many there were.

    `LOG` goes last: a start that is cut short leaves what the next one knows for such a log.
    """
    named = on_disk.decode_identity(disk.read_log_file())
    known = [one for one in (named, *map(_identity_of, files.values())) if one is not None]
    if not known or max(identity.format for identity in known) >= FORMAT:
        return 0
    count = len(files)
    while files:
        number, file = files.popitem()
        file.close()
        disk.remove(number)
    disk.sync()
    disk.remove_log_file()
    _logger.warning(
        "ssd: %s was a log of format %s, this release writes %s: %s segments were deleted, and "
        "the log is begun anew",
        *(disk.folder, known[0].format, FORMAT, count),
    )
    return count


def _identity(spec: SsdSpec, disk: Disk, files: dict[int, SegmentFile], new_id: bytes) -> Identity:
    """Which log this is: from `LOG` or, if that is damaged, from any segment."""
    raw = disk.read_log_file()
    named = on_disk.decode_identity(raw)
    found = {number: _identity_of(file) for number, file in files.items()}
    for name, identity in ((LOG_FILE, named), *((f"{n:08}.seg", i) for n, i in found.items())):
        if identity is not None and identity.format != FORMAT:
            raise ConfigError(
                f"{disk.folder / name} has format {identity.format}, this release reads {FORMAT}; "
                f"nothing was changed: use the release that wrote it, or move the folder away"
            )
    known = [identity for identity in (named, *found.values()) if identity is not None]
    if not known and files:
        raise ConfigError(
            f"{disk.folder} holds {len(files)} segments, but neither {LOG_FILE} nor any of them "
            f"says of which log; nothing was changed: restore {LOG_FILE}, or move the folder away"
        )
    if not known:
        known = [Identity(new_id[:LOG_ID_BYTES], spec.align, spec.segment, 0)]
    log = known[0]._replace(number=0)
    for number, identity in found.items():
        # another number is damage: the records in there name their segment and don't count
        if identity is not None and identity._replace(number=0) != log:
            raise ConfigError(
                f"{disk.folder}: {number:08}.seg is not of the same log as the rest; nothing was "
                f"changed: move it away"
            )
    _check_shape(spec, disk, log)
    if named is None:
        disk.write_log_file(on_disk.encode_identity(log))
    return log


def _identity_of(file: SegmentFile) -> Identity | None:
    raw = aligned_buffer(_LARGEST_IDENTITY)
    try:
        return on_disk.decode_identity(bytes(raw[: file.read(0, [raw])]))
    except OSError:
        return None


def _check_shape(spec: SsdSpec, disk: Disk, log: Identity) -> None:
    if spec.direct and log.align % DIRECT_ALIGN:
        raise ConfigError(
            f"{disk.folder} was made with records at multiples of {log.align} bytes, which "
            f"O_DIRECT can't read; set direct: false, or move the folder away"
        )
    if spec.capacity // log.segment_bytes < 3:
        raise ConfigError(
            f"{disk.folder} has segments of {log.segment_bytes} bytes and a capacity of "
            f"{spec.capacity}; a log needs three: raise the capacity, or move the folder away"
        )


def _volume(
    spec: SsdSpec, disk: Disk, log: Identity, files: dict[int, SegmentFile], threads: Threads
) -> Volume:
    segments = spec.capacity // log.segment_bytes
    ledger = Ledger(segments, log.segment_bytes, log.align, 0)
    ledger.live_limit_bytes = int(spec.fill * (segments - 1) * ledger.payload_bytes)
    return Volume(disk, log, ledger, threads, max(files, default=0), files)


def _fill(ledger: Ledger, scans: Sequence[Scan], align: int) -> None:
    segments, entries, graves = [], [], []
    for scan in scans:
        segment = Segment(scan.number, scan.size)
        blocks = [head for head in scan.intact if head.kind is Kind.BLOCK]
        torn = [head for head in scan.torn if head.kind is Kind.BLOCK]
        segment.copies = [head.key for head in (*blocks, *torn)]
        entries += [_entry(head, align) for head in blocks]
        graves += [(segment, grave) for grave in scan.graves]
        segments.append(segment)
        ledger.generation = max(ledger.generation, scan.generation)
    ledger.recover(segments, entries, graves)


def _entry(head: Head, align: int) -> Entry:
    size = head.record_bytes(align)
    where = (head.segment, head.offset, size, head.head_bytes(align), head.body_bytes)
    return Entry(head.key, head.generation, *where)


def _fit(volume: Volume) -> None:
    """Delete what nothing needs, and, where the capacity was lowered, the oldest segments."""
    ledger = volume.ledger
    for segment in ledger.hopeless():
        ledger.retire(segment)
    volume.delete([n for n, segment in list(ledger.segments.items()) if segment.retired])
    for segment in sorted(ledger.segments.values(), key=lambda s: s.number):
        if ledger.may_roll(compacting=True):
            break
        ledger.discard(segment)
        ledger.retire(segment)
        volume.delete([segment.number])
