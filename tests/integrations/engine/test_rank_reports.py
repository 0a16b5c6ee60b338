"""Tests how a controller merges the reports of an engine's ranks."""

from memsaver.integrations.engine.messages import Answer, RankReport
from memsaver.integrations.engine.reports import rank_reports


def test_shared_ranks_are_reported_once_and_ranks_without_a_process_id_each():
    shared = tuple(RankReport(rank, "host", 100 + rank) for rank in range(2))
    failed = tuple(RankReport(rank, "", 0) for rank in range(2))
    answers = [Answer(name, "release", (), (), ranks=(*shared, *failed)) for name in ("dp0", "dp1")]
    found = rank_reports(answers)
    assert found == (*shared, *failed, *failed)
