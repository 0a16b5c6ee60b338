"""Variants of the native artifacts for tests with sanitizers and for a fuzzer."""

from build_support.native import Variant

_SANITIZED = [
    "-O1",
    "-g1",
    "-fno-omit-frame-pointer",
    "-U_FORTIFY_SOURCE",  # sanitizers do not recognise its checked functions
    "-D_GLIBCXX_ASSERTIONS",
    # Instrumented, the arithmetic of fingerprints, which accesses only its arguments, would take 5
    # to 20 times longer and dominate the duration of many tests.
    '-DMS_FINGERPRINT_FUNCTION=__attribute__((no_sanitize("address","undefined","thread"))) inline',
]

_ASAN = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
_TSAN = ["-fsanitize=thread"]

ASAN = Variant("asan", [*_SANITIZED, *_ASAN], _ASAN, shared_runtime=True, by_folder=True)
TSAN = Variant("tsan", [*_SANITIZED, *_TSAN], _TSAN, shared_runtime=True, by_folder=True)

# The core with coverage, which tests/native/fuzz/coverage.cpp reports to libFuzzer.
FUZZ = Variant(
    "fuzz",
    [*ASAN.cxxflags, "-fsanitize-coverage=trace-pc,trace-cmp"],
    ASAN.ldflags,
    shared_runtime=True,
    by_folder=True,
    sources={"libmemsaver": ["tests/native/fuzz/coverage.cpp"]},
)
