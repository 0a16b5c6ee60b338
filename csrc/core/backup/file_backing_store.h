// file_backing_store: backups in a private file.
#pragma once

#include <map>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "core/backup/backing_store.h"
#include "core/backup/backup_file.h"

namespace memsaver {

// A backing store whose places are offsets in one sparse file.
class FileBackingStore : public BackingStore {
 public:
  // Throws kBackupFailed if no file can be created in the directory.
  explicit FileBackingStore(const std::string& directory) : file_(BackupFile::create(directory)) {}

  void cover(const std::vector<VaReservation>& spans) override;
  void claim(const std::vector<Range>&) override {
  }  // see populate(): only the file system can reserve its blocks
  void populate(const Range& part) override;
  void attach(const Range&) override {}
  void drop(const Range& chunk) override;
  uint64_t unreturned_bytes() const override;
  void* direct(uint64_t) const override { return nullptr; }
  void* view(uint64_t) const override { return nullptr; }
  void write(uint64_t address, const void* source, uint64_t bytes) override {
    file_.write(place(address), source, bytes);
  }
  void read(uint64_t address, void* target, uint64_t bytes) override {
    file_.read(place(address), target, bytes);
  }

 private:
  uint64_t place(uint64_t address) const;

  BackupFile file_;
  std::map<uint64_t, uint64_t> starts_;  // address of a span -> its offset in the file
  uint64_t end_ = 0;
  mutable std::mutex mutex_;       // guards the next two
  std::set<uint64_t> populated_;   // addresses of parts of chunks
  std::vector<Range> unreturned_;  // parts of dropped chunks that could not be punched; disjoint
};

}  // namespace memsaver
