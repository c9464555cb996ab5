/* Shorten the time for which OpenMP's threads spin while they wait for each other.
 *
 * GCC's runtime spins for milliseconds, which takes a core from the thread that it waits for if other programs use the
 * cores. If a process has more OpenMP threads than cores, the runtime spins for about a microsecond and then sleeps
 * (its manual, GOMP_SPINCOUNT). So waiting_shorten starts that many more threads, which sleep until waiting_restore. */
#include <omp.h>
#include <pthread.h>

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t restored = PTHREAD_COND_INITIALIZER;
static pthread_t keeper;
static int is_short;
static int num_extra;

static void *keep(void *unused) {
#pragma omp parallel num_threads(num_extra)
    {
        pthread_mutex_lock(&lock);
        while (is_short) pthread_cond_wait(&restored, &lock);
        pthread_mutex_unlock(&lock);
    }
    return unused;
}

static void *wait_for_lock(void *unused) {
    pthread_mutex_lock(&lock);
    pthread_mutex_unlock(&lock);
    return unused;
}

/* Return 0 if the system allows this many more threads; OpenMP's runtime would abort the process. */
static int try_threads(int count) {
    pthread_t threads[count];
    int started = 0, error = 0;
    pthread_mutex_lock(&lock);
    while (started < count && !(error = pthread_create(&threads[started], NULL, wait_for_lock, NULL))) started++;
    pthread_mutex_unlock(&lock);
    for (int i = 0; i < started; i++) pthread_join(threads[i], NULL);
    return error;
}

/* Start the threads; 0 if they run, else the error of pthread_create. Call waiting_restore before the next call. */
int waiting_shorten(int cores) {
    num_extra = cores + 1; /* one of them is not an additional one */
    int error = try_threads(num_extra + 1);
    if (error) return error;
    is_short = 1;
    error = pthread_create(&keeper, NULL, keep, NULL);
    if (error) is_short = 0;
    return error;
}

/* End the threads. */
void waiting_restore(void) {
    pthread_mutex_lock(&lock);
    is_short = 0;
    pthread_cond_broadcast(&restored);
    pthread_mutex_unlock(&lock);
    pthread_join(keeper, NULL);
}
