"""What preflight finds on machines, laid out as folders of `/sys`, `/proc` and `/dev`."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kimi_operator.api.load import validated
from kimi_operator.cli import main
from kimi_operator.desired.effective import resolve
from kimi_operator.preflight.checks import (
    DiskWanted,
    Finding,
    MachineFacts,
    RdmaWanted,
    Wanted,
    findings,
)
from kimi_operator.preflight.demand import wanted_of
from kimi_operator.preflight.machine import machine_facts
from kimi_operator.preflight.report import CAP_BYTES, Report, last_words
from kimi_operator.presets.preset import load_preset
from machines import GIB, GOOD, Machine

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
WANTED = Wanted(
    deployment="llm/kimi",
    gpus=8,
    rdma=RdmaWanted(cards=8, gid_index=3),
    memory_bytes=1024 * GIB,
    hugepage_bytes=2**21,
    hugepages_bytes=512 * GIB,
    disks=(
        DiskWanted(path="/mnt/nvme/kv", free_bytes=4096 * GIB, why="kvPool.ssd.capacity"),
        DiskWanted(path="/models/kimi", read=True, why="model.path"),
    ),
    own_folder="llm.kimi",
)
THERE = GOOD.but(folders=("/mnt/nvme",), files=("/models/kimi/config.json",))


def found(machine: Machine, root: Path, *wanted: Wanted) -> dict[str, Finding]:
    facts = machine_facts("n1", wanted or (WANTED,), machine.laid_out(root), machine.space)
    return {finding.check: finding for finding in findings(wanted or (WANTED,), facts)}


def test_a_good_machine_passes_every_check(tmp_path: Path):
    result = found(THERE, tmp_path)
    assert {check: finding.ok for check, finding in result.items()} == dict.fromkeys(
        ("gpu", "rdma", "hugepages", "memory", "disk", "model"), True
    )
    assert [finding.remedy for finding in result.values()] == [""] * 6


DOWN = {f"rdma{i}": "1: DOWN" if i == 3 else "4: ACTIVE" for i in range(8)}
SEVEN = {f"rdma{i}": "4: ACTIVE" for i in range(7)}
ONLY_LOCAL = {3: ("fe80:0000:0000:0000:0000:0000:0000:0001", "IB/RoCE v1")}


@pytest.mark.parametrize(
    ("changed", "check", "have", "remedy"),
    [
        ({"gpus": 7}, "gpu", "7 GPUs in /dev/dri and /dev/kfd", "a GPU is missing"),
        ({"kfd": False, "gpus": 0}, "gpu", "no /dev/kfd", "load the amdgpu driver"),
        ({"states": DOWN}, "rdma", "rdma3/1 is DOWN", "bring the ports up"),
        ({"states": SEVEN}, "rdma", "7 of 7 RDMA ports", ""),
        ({"states": {}}, "rdma", "0 of 0 RDMA ports", "load the card's RDMA driver"),
        ({"gids": {}}, "rdma", "rdma0/1 has no RoCE v2 GID index 3 (there are: none)", "address"),
        ({"gids": ONLY_LOCAL}, "rdma", "(there are: 3 IB/RoCE v1)", "rdma.gidIndex"),
        ({"hugepages_2mi": 100}, "hugepages", "100 pages of 2Mi", "hugepages=262144"),
        ({"memory_gib": 1000}, "memory", "488.0 GiB beside huge pages", "lower kvPool.dram"),
        ({"free_gib": 10}, "disk", "10.0 GiB of 16384.0 GiB free", "free space there"),
        ({"files": ()}, "model", "/models/kimi is not there", "copy the model there"),
        ({"files": (), "folders": ("/models/kimi",)}, "model", "is empty", "copy the model"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_a_machine_lacks_is_told_in_numbers_with_a_remedy(
    changed: dict[str, Any], check: str, have: str, remedy: str, tmp_path: Path
):
    result = found(THERE.but(**changed), tmp_path)
    bad = result.pop(check)
    assert not bad.ok
    assert have in bad.have
    assert remedy in bad.remedy
    assert bad.remedy
    assert all(finding.ok for finding in result.values()), "and nothing else is wrong"


def test_named_cards_must_be_there(tmp_path: Path):
    wanted = WANTED.model_copy(update={"rdma": RdmaWanted(cards=2, devices=("rdma0", "mlx5_0"))})
    finding = found(THERE, tmp_path, wanted)["rdma"]
    assert not finding.ok
    assert "mlx5_0 not there" in finding.have


def test_without_an_index_a_routable_gid_will_do(tmp_path: Path):
    wanted = WANTED.model_copy(update={"rdma": RdmaWanted(cards=8)})
    assert found(THERE, tmp_path / "a", wanted)["rdma"].ok
    link_local = {1: ("fe80:0000:0000:0000:0000:0000:0000:0001", "RoCE v2")}
    assert not found(THERE.but(gids=link_local), tmp_path / "b", wanted)["rdma"].ok


def test_memory_of_several_deployments_is_added_up(tmp_path: Path):
    second = WANTED.model_copy(
        update={"deployment": "llm/other", "own_folder": "llm.other", "disks": ()}
    )
    roomy = THERE.but(hugepages_2mi=2 * 512 * 512, memory_gib=3072)
    assert found(roomy, tmp_path / "a", WANTED, second)["memory"].ok
    tight = found(roomy.but(memory_gib=3071), tmp_path / "b", WANTED, second)["memory"]
    assert not tight.ok
    assert tight.want == "2048.0 GiB"
    assert "llm/other takes 1024.0 GiB" in tight.have
    few = found(THERE, tmp_path / "c", WANTED, second)["hugepages"]
    assert (few.ok, few.want) == (False, "524288 pages")


def test_space_on_one_file_system_is_added_up_and_what_is_held_counts(tmp_path: Path):
    disks = (
        DiskWanted(path="/mnt/nvme/kv", free_bytes=4096 * GIB, why="kvPool.ssd.capacity"),
        DiskWanted(path="/mnt/nvme/cache", free_bytes=600 * GIB, why="model.cache.size"),
    )
    wanted = WANTED.model_copy(update={"disks": disks})
    facts = machine_facts(
        "n", [wanted], THERE.laid_out(tmp_path), lambda _: (4500 * GIB, 9000 * GIB)
    )
    short = [finding for finding in findings([wanted], facts) if finding.check == "disk"]
    assert [finding.ok for finding in short] == [False, False]
    assert "4696.0 GiB more for all 2 there" in short[0].want
    first, second = facts.disks
    grown = first.model_copy(update={"held_bytes": 4000 * GIB})
    again = findings([wanted], facts.model_copy(update={"disks": (grown, second)}))
    assert all(finding.ok for finding in again if finding.check == "disk")


def test_files_that_are_there_are_counted(tmp_path: Path):
    root = THERE.but(folders=("/mnt/nvme/kv/a",)).laid_out(tmp_path)
    (root / "mnt/nvme/kv/a/segment").write_bytes(b"x" * 100_000)
    facts = machine_facts("n", [WANTED], root, THERE.space)
    assert 100_000 <= facts.disks[0].held_bytes < 200_000


def test_what_pools_of_others_hold_counts_and_the_own_does_not(tmp_path: Path):
    machine = THERE.but(arenas={"llm.kimi": 900 * GIB, "llm.other": 1800 * GIB})
    finding = found(machine, tmp_path)["memory"]
    assert not finding.ok
    assert "llm.other has taken 1800.0 GiB" in finding.have
    assert "llm.kimi" not in finding.have


def wanted_by(document: dict[str, Any], *roles: Any) -> Wanted:
    effective = resolve(validated(document, "file"), load_preset, "file")
    return wanted_of(effective, roles or None)


def deployment(**spec: Any) -> dict[str, Any]:
    return {
        "apiVersion": "kimistack.dev/v1alpha1",
        "kind": "KimiDeployment",
        "metadata": {"name": "k", "namespace": "llm"},
        "spec": spec,
    }


def test_a_preset_with_rdma_and_huge_pages_asks_for_all_of_it():
    wanted = wanted_by(
        deployment(
            preset="kimi-k2.6-mxfp4/mi355x",
            rdma={"mode": "hostNetwork", "gidIndex": 3},
            security={"profile": "RDMA"},
        )
    )
    assert (wanted.gpus, wanted.own_folder) == (4, "llm.k")
    assert wanted.rdma == RdmaWanted(cards=4, gid_index=3)
    assert (wanted.hugepage_bytes, wanted.hugepages_bytes) == (2**21, 512 * GIB)
    assert 512 * GIB < wanted.memory_bytes < 520 * GIB, "an engine and the daemon, not its pages"


def test_a_deployment_on_the_cpu_asks_for_memory_alone():
    wanted = wanted_by(deployment(preset="kimi-nano/cpu"))
    assert (wanted.gpus, wanted.rdma, wanted.disks, wanted.hugepages_bytes) == (0, None, (), 0)
    assert wanted.memory_bytes > 2 * GIB


def test_a_role_is_asked_for_alone():
    spec = {
        "preset": "kimi-nano/cpu",
        "prefill": {"resources": {"memory": "64Gi"}},
        "decode": {},
    }
    both, decode = wanted_by(deployment(**spec)), wanted_by(deployment(**spec), "decode")
    assert both.memory_bytes - decode.memory_bytes == 62 * GIB


@given(
    st.lists(
        st.builds(
            Finding,
            check=st.just("memory"),
            ok=st.booleans(),
            have=st.text(max_size=3000),
            want=st.text(max_size=100),
            remedy=st.text(max_size=3000),
        ),
        max_size=12,
    )
)
@settings(max_examples=50, deadline=None)
def test_a_report_fits_a_termination_message_and_keeps_its_verdict(told: list[Finding]):
    report = Report(node="n", findings=tuple(told))
    words = last_words(report)
    assert len(words.encode()) <= CAP_BYTES
    back = Report.model_validate_json(words)
    assert back.ok == report.ok
    bad = sum(not finding.ok for finding in told)
    assert sum(not finding.ok for finding in back.findings) + back.left_out == bad


def test_an_empty_folder_is_a_machine_with_nothing(tmp_path: Path):
    facts = machine_facts("n", [WANTED], tmp_path, lambda _: (0, 0))
    assert facts == MachineFacts(
        name="n", disks=facts.disks, memory_bytes=0, ports=(), hugepages=()
    )
    assert not any(finding.ok for finding in findings([WANTED], facts))


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str]:
    try:
        main([str(argument) for argument in arguments])
    except SystemExit as ended:
        code = ended.code
    return (code if isinstance(code, int) else 0), capsys.readouterr().out


def test_by_hand_it_prints_a_table_and_the_verdict_is_the_exit_code(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    good = THERE.laid_out(tmp_path / "good")
    nano = EXAMPLES / "kimi-nano.yaml"
    code, out = run(capsys, "preflight", "-f", nano, "--root", good)
    assert code == 0
    assert "memory" in out
    code, out = run(capsys, "preflight", "-f", EXAMPLES / "kimi-k26.yaml", "--root", tmp_path)
    assert code == 1
    assert "load the amdgpu driver" in out
    code, out = run(capsys, "preflight", "-f", nano, "-f", nano, "--root", good, "-o", "json")
    assert code == 0
    assert Report.model_validate_json(out).ok


def test_the_pod_leaves_its_report_where_the_kubelet_looks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    root = THERE.but(gpus=7).laid_out(tmp_path / "host")
    words = tmp_path / "termination-log"
    words.write_text("")
    code, _ = run(
        capsys,
        "preflight-node",
        "--checks",
        WANTED.model_copy(update={"disks": ()}).model_dump_json(),
        "--root",
        root,
        "--report",
        words,
        "--node",
        "node-7",
    )
    report = Report.model_validate_json(words.read_text())
    assert code == 1
    assert report.node == "node-7"
    assert [finding.check for finding in report.findings if not finding.ok] == ["gpu"]
