/* A profiler for the tests: writes each range of NVTX domains to the file that
 * MEMSAVER_TEST_RANGES names, one event per line, with fields separated by tabs:
 *   push  thread  domain  payload type  payload  message
 *   pop   thread  domain
 * The declarations follow the tool interface in NVTX 3's nvToolsExt.h and
 * nvtxDetail/nvtxTypes.h. */
#define _DEFAULT_SOURCE
#include <fcntl.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

enum {
  TABLE_CALLBACKS = 1, /* NVTX_ETID_CALLBACKS */
  MODULE_CORE2 = 5,    /* NVTX_CB_MODULE_CORE2, the functions of domains */
  RANGE_PUSH = 4,      /* NVTX_CBID_CORE2_DomainRangePushEx */
  RANGE_POP = 5,       /* NVTX_CBID_CORE2_DomainRangePop */
  DOMAIN_CREATE = 12   /* NVTX_CBID_CORE2_DomainCreateA */
};

typedef void (*function)(void);

/* NvtxExportTableCallbacks */
struct callbacks {
  size_t struct_size;
  int (*module_functions)(int module, function*** table, unsigned* size);
};

/* nvtxEventAttributes_v2 */
struct attributes {
  uint16_t version, size;
  uint32_t category;
  int32_t color_type;
  uint32_t color;
  int32_t payload_type, reserved;
  uint64_t payload;
  int32_t message_type;
  const char* message;
};

static int thread(void) { return (int)syscall(SYS_gettid); }

static void write_line(const char* line) {
  const char* path = getenv("MEMSAVER_TEST_RANGES");
  int file = path ? open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600) : -1;
  if (file < 0) return;
  if (write(file, line, strlen(line)) < 0) abort();
  close(file);
}

static void* create_domain(const char* name) { return strdup(name); }

static int push(void* domain, const struct attributes* event) {
  char line[2048];
  snprintf(line, sizeof(line), "push\t%d\t%s\t%d\t%llu\t%s\n", thread(), (char*)domain,
           event->payload_type, (unsigned long long)event->payload, event->message);
  write_line(line);
  return 0;
}

static int pop(void* domain) {
  char line[256];
  snprintf(line, sizeof(line), "pop\t%d\t%s\n", thread(), (char*)domain);
  write_line(line);
  return 0;
}

int InitializeInjectionNvtx2(const void* (*export_table)(uint32_t)) {
  const struct callbacks* callbacks = export_table(TABLE_CALLBACKS);
  function** table = NULL;
  unsigned size = 0;
  if (!callbacks || !callbacks->module_functions(MODULE_CORE2, &table, &size)) return 0;
  if (size <= DOMAIN_CREATE) return 0;
  *table[DOMAIN_CREATE] = (function)create_domain;
  *table[RANGE_PUSH] = (function)push;
  *table[RANGE_POP] = (function)pop;
  return 1;
}
