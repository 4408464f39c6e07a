"""What a look at a machine says: the last words of a preflight pod, at most 4096 bytes. Pure."""

from pydantic import BaseModel, ConfigDict

from kimi_operator.preflight.checks import Finding

CAP_BYTES = 4000
"""The kubelet keeps 4096 bytes of a termination message."""
TEXT_CAP = 600


class Report(BaseModel):
    """The node and the findings. `left_out` counts findings that had no room."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    node: str
    findings: tuple[Finding, ...]
    left_out: int = 0

    @property
    def ok(self) -> bool:
        """Whether everything is as the spec asks for."""
        return not self.left_out and all(finding.ok for finding in self.findings)


def last_words(report: Report) -> str:
    """The report as it fits: what is wrong first, long texts cut, then as many as there is room."""
    ordered = sorted(report.findings, key=lambda finding: finding.ok)
    short = [
        finding.model_copy(update={"have": _cut(finding.have), "remedy": _cut(finding.remedy)})
        for finding in ordered
    ]
    for count in range(len(short), -1, -1):
        bad = sum(not finding.ok for finding in short[count:])
        text = Report(node=report.node, findings=tuple(short[:count]), left_out=bad)
        words = text.model_dump_json()
        if len(words.encode()) <= CAP_BYTES:
            return words
    raise AssertionError("a report without findings always fits")


def _cut(text: str) -> str:
    return text if len(text) <= TEXT_CAP else f"{text[: TEXT_CAP - 1]}…"
