// quiet_start: starts the library's threads with the process's signals blocked.
#pragma once

#include <pthread.h>
#include <signal.h>

namespace memsaver {

// While it exists, threads that this thread starts have every signal blocked, except signals that
// report the thread's own faults, because they cannot be deferred.
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
