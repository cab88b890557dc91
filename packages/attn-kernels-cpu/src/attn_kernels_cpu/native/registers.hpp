// The tile registers of AMX: eight of up to sixteen rows of 64 bytes, which a process has to ask the system for.
#pragma once
#include <cstdint>

#if defined(__AMX_BF16__) && defined(__AMX_INT8__) && defined(__AMX_TILE__) && defined(__AVX512BF16__) && defined(__linux__)
#define TILE_REGISTERS
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

// Whether the system lets this process use the registers: it has to be asked once.
static bool tiles_allowed() {
  constexpr int REQUEST = 0x1023, TILE_DATA = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  static const bool allowed = syscall(SYS_arch_prctl, REQUEST, TILE_DATA) == 0;
  return allowed;
}

struct alignas(64) Registers {
  uint8_t palette = 1, start = 0, reserved[14] = {};
  uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

// All registers hold sixteen rows of 64 bytes.
static inline void configure_tiles() {
  static constexpr Registers config;
  _tile_loadconfig(&config);
}

// Sums and rows, in the first six, have only so many rows: products of fewer take less time.
struct FewRows {
  Registers of[17];
  constexpr FewRows() {
    for (int count = 0; count <= 16; count++)
      for (int i = 0; i < 6; i++) of[count].rows[i] = count;
  }
};
static inline void configure_few(int rows) {
  static constexpr FewRows configs;
  _tile_loadconfig(&configs.of[rows]);
}

// The fifth and sixth hold sixteen rows of 32 bytes, the last two eight rows of 64: one group of int4 weights.
static inline void configure_groups() {
  static constexpr Registers config{.bytes = {64, 64, 64, 64, 32, 32, 64, 64}, .rows = {16, 16, 16, 16, 16, 16, 8, 8}};
  _tile_loadconfig(&config);
}

static inline void release_tiles() { _tile_release(); }

// What was written before is in memory now: compilers (g++ 12) do not know that loading a tile reads it.
static inline void written() { asm volatile("" ::: "memory"); }
#else
static bool tiles_allowed() { return false; }
#endif
