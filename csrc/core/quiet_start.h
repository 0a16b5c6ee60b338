// quiet_start: threads of ours take none of the process's signals.
#pragma once

#include <pthread.h>
#include <signal.h>

namespace memsaver {

// While it lives, threads that are started by this one have every signal blocked but those that a
// thread raises by its own faults, which cannot wait.
class QuietStart {
 public:
  QuietStart() {
    sigset_t blocked;
    sigfillset(&blocked);
    for (const int fault : {SIGSEGV, SIGBUS, SIGILL, SIGFPE, SIGTRAP, SIGSYS, SIGABRT}) {
      sigdelset(&blocked, fault);
    }
    pthread_sigmask(SIG_SETMASK, &blocked, &before_);
  }
  ~QuietStart() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
  QuietStart(const QuietStart&) = delete;
  QuietStart& operator=(const QuietStart&) = delete;

 private:
  sigset_t before_;
};

}  // namespace memsaver
