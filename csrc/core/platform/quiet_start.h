// quiet_start: starts the library's threads with signals blocked.
#pragma once

#include <pthread.h>
#include <signal.h>

namespace memsaver {

// While a QuietStart exists, threads that the calling thread starts have all signals blocked,
// except signals that report the new thread's own faults, because such signals cannot be deferred.
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
