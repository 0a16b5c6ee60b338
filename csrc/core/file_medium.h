// file_medium: backups in a private file.
#pragma once

#include <map>
#include <string>

#include "core/backup_file.h"
#include "core/backup_medium.h"

namespace memsaver {

// Places are offsets in one sparse file.
class FileMedium : public BackupMedium {
 public:
  // Throws kBackupFailed where no file can be made in the directory.
  explicit FileMedium(const std::string& directory) : file_(BackupFile::create(directory)) {}

  void cover(const std::vector<VaReservation>& spans) override;
  void claim(uint64_t) override {}  // by populate(): only the file system can promise its blocks
  void populate(const Range& cell) override { file_.reserve(place(cell.address), cell.bytes); }
  void attach(const Range&) override {}
  void drop(const Range& cell) override { file_.punch(place(cell.address), cell.bytes); }
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
};

}  // namespace memsaver
