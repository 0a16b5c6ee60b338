#include "core/kernel_image.h"

// MEMSAVER_EMBEDDED is the file's path, given by the build. The driver reads words of 8 bytes in
// it.
asm(".pushsection .rodata\n"
    ".balign 16\n"
    ".globl memsaver_fingerprint_image\n"
    ".hidden memsaver_fingerprint_image\n"
    ".type memsaver_fingerprint_image, @object\n"
    "memsaver_fingerprint_image:\n"
    ".incbin \"" MEMSAVER_EMBEDDED
    "\"\n"
    ".size memsaver_fingerprint_image, . - memsaver_fingerprint_image\n"
    ".popsection\n");

extern "C" const unsigned char memsaver_fingerprint_image[];

namespace memsaver {

const void* fingerprint_image() noexcept { return memsaver_fingerprint_image; }

}  // namespace memsaver
