/* Tiles of 16-bit numbers in shared memory, and products of them.

A row is split into chunks of 16 bytes, in a different order in each row (a swizzle). This puts the eight rows of a
chunk that `load_matrices` reads at once, and the eight chunks of a row that a copy writes, in different banks. */
#ifndef MLBERT_FMHA_TILES_CUH
#define MLBERT_FMHA_TILES_CUH

#include "sequence.cuh"

/* Rows of COLUMNS elements, 32 or 64. */
template <int COLUMNS> struct Tile {
    static constexpr int CHUNKS = COLUMNS / 8, ROW_BYTES = 2 * COLUMNS;
    uint32_t address;

    DEVICE uint32_t chunk(int row, int chunk) const {
        return address + row * ROW_BYTES + ((chunk ^ (row * CHUNKS / 8 % CHUNKS)) * 16);
    }

    /* Store a pair of elements at an even column. */
    DEVICE void store(int row, int column, uint32_t pair) const {
        store_word(chunk(row, column / 8) + column % 8 * 2, pair);
    }
};

using HeadTile = Tile<HEAD_SIZE>;

constexpr int head_tile_bytes(int rows) { return rows * HeadTile::ROW_BYTES; }

/* Start copying the vectors of ROWS tokens; rows from `valid` on are zero. */
template <int ROWS> DEVICE void copy_tile(HeadTile tile, const uint16_t *first, int stride, int valid) {
#pragma unroll
    for (int i = 0; i < ROWS * HeadTile::CHUNKS; i += THREADS) {
        const int row = (i + threadIdx.x) / HeadTile::CHUNKS, chunk = threadIdx.x % HeadTile::CHUNKS;
        const bool wanted = row < valid;
        copy_async(tile.chunk(row, chunk), first + (wanted ? row : 0) * stride + chunk * 8, wanted);
    }
}

/* Operands of `multiply_add` from 16 x 16 elements of a tile, starting at the given row and column. `left`: the tile
has the product's rows as rows, or is transposed. `right`: two adjacent operands; the tile has the product's columns as
rows, or is transposed. */
template <int COLUMNS> DEVICE void load_left(uint32_t (&to)[4], Tile<COLUMNS> tile, int row, int column) {
    const int lane = threadIdx.x % 32;
    load_matrices(to, tile.chunk(row + lane % 16, column / 8 + lane / 16));
}

template <int COLUMNS> DEVICE void load_right(uint32_t (&to)[4], Tile<COLUMNS> tile, int row, int column) {
    const int lane = threadIdx.x % 32;
    load_matrices(to, tile.chunk(row + lane % 8 + lane / 16 * 8, column / 8 + lane / 8 % 2));
}

template <int COLUMNS> DEVICE void load_left_transposed(uint32_t (&to)[4], Tile<COLUMNS> tile, int row, int column) {
    const int lane = threadIdx.x % 32;
    load_transposed(to, tile.chunk(row + lane % 8 + lane / 16 * 8, column / 8 + lane / 8 % 2));
}

template <int COLUMNS> DEVICE void load_right_transposed(uint32_t (&to)[4], Tile<COLUMNS> tile, int row, int column) {
    const int lane = threadIdx.x % 32;
    load_transposed(to, tile.chunk(row + lane % 16, column / 8 + lane / 16));
}

/* A warp's part of a product: 32 rows in two groups of 16, COLUMNS columns in groups of 8. */
template <int COLUMNS> using Sums = float[2][COLUMNS / 8][4];

/* The left operand of a product over DEPTH elements, 32 rows. */
template <int DEPTH> using Left = uint32_t[2][DEPTH / 16][4];

template <int COLUMNS> DEVICE void set_zero(Sums<COLUMNS> &sums) {
#pragma unroll
    for (int i = 0; i < 2 * COLUMNS / 8 * 4; i++) sums[i / (COLUMNS / 2)][i / 4 % (COLUMNS / 8)][i % 4] = 0.0f;
}

/* Add the products of one left operand per group of rows and one right operand per two groups of columns. */
template <Type TYPE, int COLUMNS>
DEVICE void add_products(Sums<COLUMNS> &sums, const uint32_t (&upper)[4], const uint32_t (&lower)[4],
                         const uint32_t (&right)[4], int column) {
    multiply_add<TYPE>(sums[0][column / 8], upper, right[0], right[1]);
    multiply_add<TYPE>(sums[0][column / 8 + 1], upper, right[2], right[3]);
    multiply_add<TYPE>(sums[1][column / 8], lower, right[0], right[1]);
    multiply_add<TYPE>(sums[1][column / 8 + 1], lower, right[2], right[3]);
}

/* sums += 32 rows of `left` starting at `row`, times the transposed COLUMNS rows of `right` starting at `first`. */
template <Type TYPE, int COLUMNS>
DEVICE void add_scores(Sums<COLUMNS> &sums, HeadTile left, int row, HeadTile right, int first) {
#pragma unroll
    for (int k = 0; k < HEAD_SIZE; k += 16) {
        uint32_t upper[4], lower[4];
        load_left(upper, left, row, k);
        load_left(lower, left, row + 16, k);
#pragma unroll
        for (int column = 0; column < COLUMNS; column += 16) {
            uint32_t operand[4];
            load_right(operand, right, first + column, k);
            add_products<TYPE, COLUMNS>(sums, upper, lower, operand, column);
        }
    }
}

/* sums += left [32, DEPTH] times DEPTH rows of `right` starting at `first`. */
template <Type TYPE, int DEPTH>
DEVICE void add_vectors(Sums<HEAD_SIZE> &sums, const Left<DEPTH> &left, HeadTile right, int first) {
#pragma unroll
    for (int k = 0; k < DEPTH; k += 16) {
#pragma unroll
        for (int column = 0; column < HEAD_SIZE; column += 16) {
            uint32_t operand[4];
            load_right_transposed(operand, right, first + k, column);
            add_products<TYPE, HEAD_SIZE>(sums, left[0][k / 16], left[1][k / 16], operand, column);
        }
    }
}

/* Convert the four sums of a group of rows and of columns `group` to their part of a left operand, as two pairs. */
template <int DEPTH> DEVICE void set_left(Left<DEPTH> &left, int rows, int group, uint32_t first, uint32_t second) {
    left[rows][group / 2][group % 2 * 2] = first;
    left[rows][group / 2][group % 2 * 2 + 1] = second;
}

#endif
