"""Tests workers: their jobs, errors and number."""

import os

import pytest
from control_groups import IN_JOB_V1, IN_JOB_V2


@pytest.mark.parametrize(
    ("granted", "wanted", "threads", "on_caller"),
    [(99, 4, 4, 0), (1, 4, 1, 0), (0, 4, 0, 100), (99, 0, 0, 100), (99, 1, 1, 0)],
)
def test_every_job_runs_once_with_as_many_threads_as_there_are(
    leaf, granted, wanted, threads, on_caller
):
    said = leaf("workers_order", granted, wanted)
    assert said == [f"threads {threads} on caller {on_caller}"]


def test_jobs_run_in_the_background_and_end_in_any_order(leaf):
    assert leaf("workers_background") == ["1 is done", "0 is done"]


@pytest.mark.parametrize("granted", [99, 1, 0])
def test_an_error_is_kept_for_the_waiting_caller(leaf, granted):
    broken = "error 6 needed 0 free 0: job 3 is broken"
    absent = "error 11 needed 0 free 0: there is no job 10"
    assert leaf("workers_error", granted) == [broken, broken, absent, "ran 10"]


def test_after_cancel_nothing_runs_and_nothing_starts(leaf):
    assert leaf("workers_cancel") == ["error 11 needed 0 free 0: job 999 was cancelled"]


def test_the_destructor_waits_for_running_jobs_only(leaf):
    assert leaf("workers_destroyed") == []


def test_workers_get_no_signal_but_their_faults(leaf):
    assert leaf("workers_signals") == ["blocked 4 of 4, faults 0, the caller's 0"]


@pytest.mark.parametrize(("granted", "on_caller"), [(99, 1), (2, 3), (0, 5)])
def test_parallel_calls_all_run_and_the_first_error_counts(leaf, granted, on_caller):
    assert leaf("parallel", granted) == [
        "error 7 needed 0 free 0: call 3",
        f"ran 5 on caller {on_caller} the first too",
    ]


CPUS = len(os.sched_getaffinity(0))


@pytest.mark.parametrize(
    ("files", "count"),
    [
        ({}, CPUS),
        ({**IN_JOB_V2, "/sys/fs/cgroup/a/job/cpu.max": "max 100000\n"}, CPUS),
        ({**IN_JOB_V2, "/sys/fs/cgroup/a/job/cpu.max": "50000 100000\n"}, 1),
        ({**IN_JOB_V2, "/sys/fs/cgroup/a/job/cpu.max": "100001 100000\n"}, 2),
        ({**IN_JOB_V2, "/sys/fs/cgroup/a/cpu.max": "100000 100000\n"}, 1),
        ({**IN_JOB_V2, "/sys/fs/cgroup/b/cpu.max": "100000 100000\n"}, CPUS),
        ({**IN_JOB_V2, "/sys/fs/cgroup/a/job/cpu.max": "nonsense\n"}, CPUS),
        (
            {
                **IN_JOB_V1,
                "/sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "90000\n",
                "/sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000\n",
            },
            1,
        ),
        (
            {
                **IN_JOB_V1,
                "/sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "-1\n",
                "/sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000\n",
            },
            CPUS,
        ),
    ],
)
def test_the_worker_count_follows_cpus_and_quotas(system, files, count):
    assert system(files)("worker_count") == [str(min(count, CPUS, 16))]


def test_worker_count_follows_the_affinity(leaf):
    one = min(os.sched_getaffinity(0))
    assert leaf("worker_count", shell=f"taskset -pc {one} $$ >/dev/null") == ["1"]
