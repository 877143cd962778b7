"""history.jsonl: append-only, readable after any crash."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gpubox.rollout.history import Entry, History, Verdict


def entry(text: str) -> Entry:
    return Entry(
        time="2026-01-01T00:00:00Z",
        run="r",
        who=text,
        action="activate",
        from_release=None,
        to_release="a",
        verdict=Verdict.PROVED,
        log=[text],
    )


@given(texts=st.lists(st.text(), min_size=1, max_size=4), cut=st.integers(0, 40))
def test_a_torn_line_costs_only_itself(tmp_path_factory, texts: list[str], cut: int) -> None:  # type: ignore[no-untyped-def]
    history = History(tmp_path_factory.mktemp("h") / "history.jsonl")
    for text in texts:
        history.append(entry(text))
    whole = history.path.read_bytes()
    history.path.write_bytes(whole[: len(whole) - cut])
    kept = len(list(history))
    history.append(entry("after the crash"))
    seen = [e.who for e in history]
    assert seen[-1] == "after the crash"
    assert len(seen) == kept + 1
    assert seen[:-1] == texts[:kept]
