#include "core/driver/kernel_image.h"

// MEMSAVER_EMBEDDED is the file's path, defined by the build. The driver reads the image in 8-byte
// words, so it is aligned.
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
