"""Contents of /proc files for a process in control groups of versions 1 and 2."""

MOUNT_V2 = "35 24 0:30 / /sys/fs/cgroup rw,nosuid shared:9 - cgroup2 cgroup2 rw\n"


def mount_v1(controllers, root="/", point=None):
    point = point or f"/sys/fs/cgroup/{controllers}"
    return f"36 31 0:31 {root} {point} rw - cgroup cgroup rw,{controllers}\n"


IN_JOB_V2 = {"/proc/self/cgroup": "0::/a/job\n", "/proc/self/mountinfo": MOUNT_V2}
IN_JOB_V1 = {
    "/proc/self/cgroup": "4:memory:/m\n3:cpu,cpuacct:/docker/job\n0::/\n",
    # A version 1 container without a cgroup namespace: the mount's root is the container's group.
    "/proc/self/mountinfo": mount_v1("memory") + mount_v1("cpu,cpuacct", "/docker/job"),
}
