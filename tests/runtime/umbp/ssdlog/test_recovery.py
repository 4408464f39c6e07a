"""A start keeps every intact record, whatever was cut, damaged or written in between."""

import random
import shutil

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import ssd_folder
from kimi_runtime.errors import ConfigError
from kimi_runtime.umbp.ssdlog import format as on_disk
from kimi_runtime.umbp.ssdlog.disk import Disk
from kimi_runtime.umbp.ssdlog.format import FORMAT, HEAD_MIN_BYTES, Identity, Kind
from kimi_runtime.umbp.ssdlog.log import SsdLog
from kimi_runtime.umbp.ssdlog.recovery import open_volume
from ssd_folder import ALIGN, block, body, key, small_spec

SIZES = {n: 1 + 37 * n % 150 for n in range(40)}


def written_log(folder):
    """A log of three segments: puts, evictions, a key put again, and an end without a seal."""
    log = SsdLog.open(small_spec(folder, segment=1536, capacity=16 * 1536))
    log.put([block(n, SIZES[n]) for n in range(5)])
    log.forget([key(1), key(2)])
    log.flush()
    log.put([block(n, SIZES[n]) for n in (2, 9, 10)])
    log.forget([key(9)])
    log.flush()
    log.put([block(1, SIZES[1])])
    files = {path.name: path.read_bytes() for path in folder.glob("*.seg")}
    files["LOG"] = (folder / "LOG").read_bytes()
    log.close()
    assert len(files) == 4
    return files


class Replay:
    """What must be live: the intact records of pristine bytes, replayed in order of generation."""

    def __init__(self, files, align=ALIGN):
        self.align = align
        log_id = on_disk.decode_identity(files["LOG"]).log_id
        self.records = []
        for name in sorted(name for name in files if name != "LOG"):
            for head in ssd_folder.heads_in(files[name], int(name[:8]), log_id, align):
                start = head.offset + head.head_bytes(align)
                graves = on_disk.decode_graves(files[name][start : start + head.body_bytes])
                self.records.append((name, head, graves))

    def live(self, damaged):
        """Keys live when `damaged(file name, first, last + 1)` says which bytes are."""
        newest, dead = {}, {}
        for name, head, graves in self.records:
            head_end = head.offset + HEAD_MIN_BYTES + 24 * len(head.groups)
            start = head.offset + head.head_bytes(self.align)
            if damaged(name, head.offset, head_end):
                continue
            if damaged(name, start, start + head.body_bytes):
                continue
            if head.kind is Kind.BLOCK:
                newest[head.key] = max(head.generation, newest.get(head.key, 0))
            for grave in graves if head.kind is Kind.TOMBSTONES else ():
                dead[grave.key] = max(grave.generation, dead.get(grave.key, 0))
        return sorted(k for k, generation in newest.items() if generation > dead.get(k, 0))


def put_back(folder, files):
    for path in folder.glob("*.seg"):
        if path.name not in files:
            path.unlink()
    for name, content in files.items():
        path = folder / name
        with path.open("r+b" if path.exists() else "wb") as file:  # in place: no wait for the disk
            file.write(content)
            file.truncate()


def keys_after_start(folder, **changes):
    sizes = {"segment": 1536, "capacity": 16 * 1536} | changes
    spec = small_spec(folder, verify_at_start="all", io_threads=1, **sizes)
    volume, _ = open_volume(spec, Disk(folder, direct=False), new_id=bytes(8))
    volume.ledger.check_integrity()
    keys = volume.ledger.keys()
    for file in volume.files.values():
        file.close()
    volume.threads.close()
    volume.disk.unlock()
    return sorted(keys)


def cut(its_name, end):
    """What is damaged when a file ends at `end`."""
    return lambda name, _, last: name == its_name and last > end


def flipped(its_name, at):
    """What is damaged when one byte is."""
    return lambda name, first, last: name == its_name and first <= at < last


def test_a_log_cut_at_any_byte_holds_what_its_intact_records_say(tmp_path):
    files = written_log(tmp_path)
    replay = Replay(files)
    for name in sorted(files.keys() - {"LOG"}):
        for end in range(len(files[name])):
            put_back(tmp_path, files | {name: files[name][:end]})
            assert keys_after_start(tmp_path) == replay.live(cut(name, end)), (name, end)


def test_a_log_with_any_one_byte_flipped_holds_what_its_intact_records_say(tmp_path):
    files = written_log(tmp_path)
    replay = Replay(files)
    chosen = random.Random(7)
    for name in sorted(files.keys() - {"LOG"}):
        raw = files[name]
        for at in range(len(raw)):
            if raw[at] == 0 and chosen.random() < 0.8:
                continue  # mostly padding
            wrong = raw[:at] + bytes([raw[at] ^ (1 << chosen.randrange(8))]) + raw[at + 1 :]
            put_back(tmp_path, files | {name: wrong})
            assert keys_after_start(tmp_path) == replay.live(flipped(name, at)), (name, at)


@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    wounds=st.lists(
        st.tuples(
            st.sampled_from(["zeros", "garbage", "another place", "another file", "gone"]),
            st.integers(0, 2),
            st.integers(0, 1535),
            st.integers(1, 700),
        ),
        min_size=1,
        max_size=5,
    ),
    seed=st.integers(0, 99),
)
def test_whatever_is_damaged_the_intact_records_stay(tmp_path, wounds, seed):
    shutil.rmtree(tmp_path)
    files = written_log(tmp_path)
    replay, changed = Replay(files), dict(files)
    names = sorted(files.keys() - {"LOG"})
    for how, which, at, size in wounds:
        name = names[which]
        raw = bytearray(changed.get(name, b""))
        size = max(0, min(size, len(raw) - at))
        match how:
            case "zeros":
                raw[at : at + size] = bytes(size)
            case "garbage":
                raw[at : at + size] = random.Random(seed).randbytes(size)
            case "another place":
                raw[at : at + size] = (files[name] * 2)[at + ALIGN :][:size]
            case "another file":
                other = files[names[which - 1]][at:][:size]
                raw[at : at + len(other)] = other
        changed[name] = bytes(raw)
        if how == "gone":
            del changed[name]
    put_back(tmp_path, changed)

    def damaged(name, first, last):
        return changed.get(name, b"")[first:last] != files[name][first:last]

    assert keys_after_start(tmp_path) == replay.live(damaged)


def test_a_large_log_with_damage_in_many_places_returns_no_wrong_byte(tmp_path):
    chosen = random.Random(3)
    spec = small_spec(tmp_path, align=4096, segment=1 << 20, capacity=12 << 20)
    log = SsdLog.open(spec)
    numbers = range(1, 100)
    assert log.put([block(n, 50_000) for n in numbers]).kept == len(numbers)
    log.close()
    for path in sorted(tmp_path.glob("*.seg")):
        raw = bytearray(path.read_bytes())
        for _ in range(4):
            raw[chosen.randrange(len(raw))] ^= 0x10
        path.write_bytes(bytes(raw))
    for verify in ("unsealed", "all"):
        log = SsdLog.open(spec.model_copy(update={"verify_at_start": verify}))
        found = log.stats()
        read = 0
        for n in numbers:
            into = memoryview(bytearray(50_000))
            if log.get([key(n)], [into]).tags:
                read += 1
                assert into == body(n, 50_000)
        stats = log.stats()
        assert stats.blocks == read == stats.recovered - stats.corrupt
        assert len(numbers) - 4 * found.segments <= read < len(numbers)
        assert stats.corrupt == 0 or verify == "unsealed"
        log.check_integrity()
        log.close()


def test_a_large_log_cut_and_flipped_at_random_holds_what_its_intact_records_say(tmp_path):
    """Puts, evictions, blocks put again; then two files are cut and up to forty bits wrong."""
    chosen, sizes = random.Random(5), {"align": 512, "segment": 64 << 10, "capacity": 24 * 64 << 10}
    log = SsdLog.open(small_spec(tmp_path, **sizes))
    for round_ in range(12):
        log.put([block(n, chosen.randrange(1, 4000)) for n in chosen.sample(range(600), 60)])
        log.forget([key(n) for n in chosen.sample(range(600), 40)])
        log.flush() if round_ % 3 else log.maintain()
    log.flush()
    files = {path.name: path.read_bytes() for path in [*tmp_path.glob("*.seg"), tmp_path / "LOG"]}
    log.close()
    replay, names = Replay(files, 512), sorted(files.keys() - {"LOG"})
    assert len(names) > 8
    for _ in range(40):
        cuts = {name: chosen.randrange(len(files[name])) for name in chosen.sample(names, 2)}
        wrong = {name: bytearray(files[name]) for name in names}
        for _ in range(chosen.randrange(40)):
            raw = wrong[chosen.choice(names)]
            raw[chosen.randrange(len(raw))] ^= 1 << chosen.randrange(8)
        left = {name: bytes(raw[: cuts.get(name)]) for name, raw in wrong.items()}
        put_back(tmp_path, files | left)

        def damaged(name, first, last, left=left):
            return left[name][first:last] != files[name][first:last]

        assert keys_after_start(tmp_path, **sizes) == replay.live(damaged)


def test_what_is_put_after_a_torn_tail_survives_the_next_start_too(tmp_path):
    files = written_log(tmp_path)
    last = max(files.keys() - {"LOG"})
    heads = [head for name, head, _ in Replay(files).records if name == last]
    torn = heads[-1].offset + heads[-1].head_bytes(ALIGN) + 1
    put_back(tmp_path, files | {last: files[last][:torn]})
    spec = small_spec(tmp_path, segment=1536, capacity=16 * 1536)
    log = SsdLog.open(spec)
    before = set(log.keys())
    assert log.put([block(n) for n in range(30, 34)]).kept == 4
    assert (tmp_path / last).stat().st_size == torn  # nothing is appended behind the damage
    for _ in range(3):
        log.close()
        log = SsdLog.open(spec)
        assert set(log.keys()) == before | {key(n) for n in range(30, 34)}
    log.close()


def test_a_lost_log_file_is_made_again_from_a_segment(tmp_path):
    files = written_log(tmp_path)
    expected = keys_after_start(tmp_path)
    raw = files["LOG"]
    size = next(end for end in range(len(raw)) if on_disk.decode_identity(raw[:end]))
    cuts = [raw[:end] for end in range(size)]
    flips = [raw[:at] + bytes([raw[at] ^ 1 << at % 8]) + raw[at + 1 :] for at in range(size)]
    for damaged in (*cuts, *flips, bytes(64)):
        put_back(tmp_path, files | {"LOG": damaged})
        assert keys_after_start(tmp_path) == expected
        assert (tmp_path / "LOG").read_bytes() == files["LOG"]


def test_segments_of_no_known_log_are_refused_and_left(tmp_path):
    files = written_log(tmp_path)
    beheaded = {name: bytes(ALIGN) + raw[ALIGN:] for name, raw in files.items()}
    put_back(tmp_path, beheaded)
    with pytest.raises(ConfigError, match="says of which log"):
        SsdLog.open(small_spec(tmp_path))
    assert {name: (tmp_path / name).read_bytes() for name in beheaded} == beheaded


@pytest.mark.parametrize("name", ["LOG", "00000002.seg"])
def test_a_newer_format_is_refused_and_left(tmp_path, name):
    files = written_log(tmp_path)
    files[name] = of_format(files[name], FORMAT + 1)
    put_back(tmp_path, files)
    with pytest.raises(ConfigError, match=f"has format {FORMAT + 1}, this release reads {FORMAT}"):
        SsdLog.open(small_spec(tmp_path))
    assert {each: (tmp_path / each).read_bytes() for each in files} == files


def of_format(raw, number):
    """The bytes of a file, as if it were of another format."""
    identity = on_disk.decode_identity(raw)._replace(format=number)
    return on_disk.encode_identity(identity) + raw[ALIGN:]


@pytest.mark.parametrize("lost", [[], ["LOG"], ["00000001.seg"], ["00000001.seg", "00000002.seg"]])
def test_a_log_of_an_older_format_is_begun_anew_also_after_a_start_that_was_cut(tmp_path, lost):
    files = written_log(tmp_path)
    old = {name: of_format(raw, FORMAT - 1) for name, raw in files.items()}
    put_back(tmp_path, old)
    for name in lost:
        (tmp_path / name).unlink()
    log = SsdLog.open(small_spec(tmp_path))
    assert log.keys() == []
    assert log.found.outdated == len([name for name in old if name[0] == "0" and name not in lost])
    assert log.put([block(1)]).put == 1
    log.close()
    assert on_disk.decode_identity((tmp_path / "LOG").read_bytes()).format == FORMAT
    assert keys_after_start(tmp_path) == [key(1)]


def test_a_log_with_files_of_an_older_and_of_this_format_is_refused_and_left(tmp_path):
    files = written_log(tmp_path)
    files["00000002.seg"] = of_format(files["00000002.seg"], FORMAT - 1)
    put_back(tmp_path, files)
    with pytest.raises(ConfigError, match=f"has format {FORMAT - 1}, this release reads {FORMAT}"):
        SsdLog.open(small_spec(tmp_path))
    assert {each: (tmp_path / each).read_bytes() for each in files} == files


def test_a_segment_of_another_log_is_refused_and_left(tmp_path):
    files = written_log(tmp_path)
    foreign = on_disk.encode_identity(Identity(b"elsewise", ALIGN, 1536, 9))
    put_back(tmp_path, files | {"00000009.seg": foreign})
    with pytest.raises(ConfigError, match=r"00000009\.seg is not of the same log"):
        SsdLog.open(small_spec(tmp_path))
    assert (tmp_path / "00000009.seg").read_bytes() == foreign


def test_a_log_in_use_is_refused(tmp_path):
    log = SsdLog.open(small_spec(tmp_path))
    with pytest.raises(ConfigError, match="in use by another process"):
        SsdLog.open(small_spec(tmp_path))
    log.close()
    SsdLog.open(small_spec(tmp_path)).close()


def test_a_folder_that_can_not_be_made_is_an_error_that_says_so(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="can't be opened"):
        SsdLog.open(small_spec(tmp_path / "file" / "folder"))


def test_a_smaller_capacity_drops_the_oldest_segments_and_revives_nothing(tmp_path):
    spec = small_spec(tmp_path, capacity=10 * 4096)
    log = SsdLog.open(spec)
    log.put([block(n, 900) for n in range(24)])
    log.forget([key(20)])
    log.close()
    assert len(list(tmp_path.glob("*.seg"))) > 5
    smaller = spec.model_copy(update={"capacity": 5 * 4096})
    for _ in range(2):
        log = SsdLog.open(smaller)
        assert ssd_folder.bytes_on_disk(tmp_path) <= 4 * 4096
        keys = set(log.keys())
        assert key(23) in keys
        assert not {key(0), key(20)} & keys
        log.check_integrity()
        log.close()


def test_the_coldest_before_a_restart_is_the_coldest_after_it(tmp_path):
    log = SsdLog.open(small_spec(tmp_path))
    log.put([block(1), block(2)])
    log.put([block(3)])
    log.close()
    log = SsdLog.open(small_spec(tmp_path))
    assert log.keys() == [key(2), key(1), key(3)]
    log.close()
