/* Growable arrays. Every function returns 0 on success and -1 if out of memory. */
#ifndef MLBERT_GROWING_H
#define MLBERT_GROWING_H

#include <stdint.h>
#include <stdlib.h>

/* Grow *array, which has room for *room elements of `size` bytes, to hold `needed` of them. */
static inline int make_room(void *array, int64_t *room, int64_t needed, size_t size)
{
    void **place = array;
    if (needed <= *room)
        return 0;
    int64_t wanted = *room + *room / 2 + 1024;
    if (wanted < needed)
        wanted = needed;
    void *moved = realloc(*place, (size_t)wanted * size);
    if (!moved)
        return -1;
    *place = moved;
    *room = wanted;
    return 0;
}

#endif
