// kernel_image: the device code that lies in this library: csrc/kernels/fingerprint.fatbin.
#pragma once

namespace memsaver {

// The kernel ms_fingerprint (csrc/kernels/fingerprint.cu) as a fatbin: for sm_70 to sm_90, sm_100
// and sm_120 as machine code, for all later ones as PTX. Static storage.
const void* fingerprint_image() noexcept;

}  // namespace memsaver
