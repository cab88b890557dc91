// The tile registers of AMX: eight of up to sixteen rows of 64 bytes, which a process must request from Linux.
#pragma once
#include <cstdint>

#if defined(__AMX_BF16__) && defined(__AMX_INT8__) && defined(__AMX_TILE__) && defined(__AVX512BF16__) && defined(__linux__)
#define TILE_REGISTERS
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

// Whether the system permits this process to use the registers, which is requested once.
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

// Configures all registers for sixteen rows of 64 bytes.
static inline void configure_tiles() {
  static constexpr Registers config;
  _tile_loadconfig(&config);
}

// Configurations for few rows: the first six registers, for sums and rows, have `count` rows, which makes products
// faster.
struct FewRows {
  Registers of[17];
  constexpr FewRows() {
    for (int count = 0; count <= 16; count++)
      for (int i = 0; i < 6; i++) of[count].rows[i] = count;
  }
};
static inline void configure_rows(int rows) {
  static constexpr FewRows configs;
  _tile_loadconfig(&configs.of[rows]);
}

// Configures the registers for one group of int4 weights: the fifth and sixth hold sixteen rows of 32 bytes, the last
// two eight rows of 64.
static inline void configure_groups() {
  static constexpr Registers config{.bytes = {64, 64, 64, 64, 32, 32, 64, 64}, .rows = {16, 16, 16, 16, 16, 16, 8, 8}};
  _tile_loadconfig(&config);
}

static inline void release_tiles() { _tile_release(); }

// A compiler barrier after stores: compilers (g++ 12) do not know that loading a tile reads memory.
static inline void written() { asm volatile("" ::: "memory"); }
#else
static bool tiles_allowed() { return false; }
#endif
