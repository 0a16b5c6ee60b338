"""The definitions of the native artifacts and their sources."""

from build_support.native import Artefact

ARTEFACTS = [
    Artefact(
        "libmemsaver",
        sources=["csrc/core/*/*.cpp", "csrc/hooks/torch_allocator.cpp"],
        exports="csrc/core/abi/exports.map",
        embeds={"csrc/core/driver/kernel_image.cpp": "csrc/kernels/fingerprint.fatbin"},
    ),
    Artefact(
        "libmemsaver_preload",
        sources=["csrc/hooks/preload*.cpp"],
        exports="csrc/hooks/exports.map",
        links=["libmemsaver"],
    ),
    Artefact(
        "libmemsaver_sim",
        sources=["csrc/sim/*.cpp"],
        exports="csrc/sim/exports.map",
    ),
    Artefact(
        "_C",
        sources=["csrc/python/*.cpp"],
        exports="build_support/module_exports.map",
        links=["libmemsaver"],
        python_module=True,
    ),
]
