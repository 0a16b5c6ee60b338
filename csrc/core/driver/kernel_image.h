// kernel_image: the device code in this library, csrc/kernels/fingerprint.fatbin.
#pragma once

namespace memsaver {

// Returns the kernel ms_fingerprint (csrc/kernels/fingerprint.cu) as a fatbin: machine code for
// sm_70 to sm_90, sm_100 and sm_120, and PTX for all later devices. The image has static storage.
const void* fingerprint_image() noexcept;

}  // namespace memsaver
