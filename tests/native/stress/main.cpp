// stress: threads that allocate, free, share, pause, resume, swap, query and write concurrently on
// the simulated driver's two devices, and check every byte that they own.
//
//   stress SEED OPERATIONS THREADS    run OPERATIONS operations on each thread
//
// Prints a line of figures and exits with 0, or prints the failed check to stderr and exits with 1.
// Needs MEMSAVER_DRIVER=sim, MEMSAVER_SIM_DEVICES=2, MEMSAVER_DISK_DIR and a short path in
// XDG_RUNTIME_DIR.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>

#include "sim/sim.h"
#include "thread.h"

namespace stress {
namespace {

// Creates two tags for each policy, a shareable one and another, so that a swap has partners of
// every kind.
void make_tags(World& world) {
  ms_error error;
  for (int i = 0; i < 10; ++i) {
    auto tag = std::make_unique<Tag>();
    tag->policy = i % 5;
    tag->name = "tag " + std::to_string(i);
    if (ms_region_enter(tag->name.c_str(), tag->policy, &error) != MS_OK ||
        ms_region_exit(&error) != MS_OK ||
        (is_shareable(world.tags.size()) &&
         ms_tag_make_shareable(tag->name.c_str(), &error) != MS_OK)) {
      world.fail(error.message);
    }
    world.tags.push_back(std::move(tag));
  }
}

// Frees everything: mapped tags first, because not all tags fit into memory at once.
void leave(World& world, std::vector<std::unique_ptr<Thread>>& threads) {
  ms_error error;
  for (const char* name : {"host_bytes", "margin_bytes"}) {
    if (ms_configure(name, "0", &error) != MS_OK) world.fail(error.message);
  }
  for (const Block& block : world.given) {
    if (ms_free(block.pointer, &error) != MS_OK) world.fail(error.message);
  }
  for (const bool paused : {false, true}) {
    for (size_t i = 0; i < world.tags.size(); ++i) {
      Tag& tag = *world.tags[i];
      if (tag.paused != paused) continue;
      const char* const name = tag.name.c_str();
      if (paused && (ms_trim(nullptr, &error) != MS_OK ||
                     ms_resume(&name, 1, nullptr, nullptr, &error) != MS_OK)) {
        world.fail(error.message);
        return;
      }
      for (auto& thread : threads) thread->leave(i);
    }
  }
  for (auto& thread : threads) thread->close();
}

// Checks that no memory, warnings, violations or driver objects are left.
void check_nothing_is_left(World& world) {
  ms_error error;
  ms_usage* rows = nullptr;
  size_t count = 0;
  uint64_t released = 0;
  if (ms_trim(&released, &error) != MS_OK || ms_stats(&rows, &count, &error) != MS_OK) {
    world.fail(error.message);
    return;
  }
  for (size_t i = 0; i < count; ++i) {
    if (rows[i].allocations || rows[i].resident_bytes || rows[i].host_bytes || rows[i].disk_bytes ||
        rows[i].peer_bytes) {
      world.fail(std::string(rows[i].tag) + " still holds something");
    }
  }
  ms_list_free(rows);
  char text[500];
  while (ms_next_warning(text, sizeof(text))) {
    // The hooks warn if a device is full.
    if (!std::strstr(text, "an allocation in tag") && !std::strstr(text, "were dropped")) {
      world.fail("warning: " + std::string(text));
    }
  }
  sim_totals totals;
  sim_counts(&totals);
  if (totals.violations || totals.illegal_accesses) {
    sim_violation(0, text, sizeof(text));
    world.fail(text);
  }
  if (totals.handles != 0 || totals.mappings != 0 || totals.registered_bytes != 0) {
    world.fail("the driver still has handles, mappings or pinned memory");
  }
}

int run(uint64_t seed, uint64_t operations, unsigned count) {
  World world;
  world.lost = seed % 2 ? 0xFF : 0;
  ms_error error;
  if (ms_configure("poison", seed % 2 ? "on" : "off", &error) != MS_OK) world.fail(error.message);
  // The devices have 128 MiB: most of it stays free of backups, so that every tag can be resumed.
  if (ms_configure("peer_margin_bytes", "96MiB", &error) != MS_OK) world.fail(error.message);
  // So short that some pauses time out while they wait for an importer.
  if (ms_configure("importer_seconds", "0.01", &error) != MS_OK) world.fail(error.message);
  make_tags(world);
  std::vector<std::unique_ptr<Thread>> threads;
  for (unsigned i = 0; i < count; ++i) {
    threads.push_back(std::make_unique<Thread>(world, seed * 1000 + i));
  }
  std::vector<std::thread> running;
  for (auto& thread : threads) {
    running.emplace_back([&thread, operations] { thread->run(operations); });
  }
  for (std::thread& thread : running) thread.join();
  sim_clear_faults();
  if (!world.stop) leave(world, threads);
  if (!world.stop) check_nothing_is_left(world);
  if (world.stop) return 1;
  uint64_t all = 0;
  std::string text;
  for (size_t kind = 0; Thread::name_of(kind); ++kind) {
    all += world.done[kind];
    text += std::string(", ") + Thread::name_of(kind) + " " + std::to_string(world.done[kind]) +
            " (" + std::to_string(world.refused[kind]) + " refused)";
  }
  std::printf("%llu operations%s\n", static_cast<unsigned long long>(all), text.c_str());
  return 0;
}

}  // namespace
}  // namespace stress

int main(int count, char** arguments) {
  if (count != 4) {
    std::fprintf(stderr, "usage: %s SEED OPERATIONS THREADS\n", arguments[0]);
    return 2;
  }
  return stress::run(std::strtoull(arguments[1], nullptr, 10),
                     std::strtoull(arguments[2], nullptr, 10),
                     static_cast<unsigned>(std::strtoul(arguments[3], nullptr, 10)));
}
