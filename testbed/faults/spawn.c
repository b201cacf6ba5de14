/* Processes that are hard to see, for the fault suite. Ends with its standard input; then it says
 * how many there were a second.
 *
 *   spawn short RATE     processes that end at once, RATE of them a second
 *   spawn threads RATE   one process whose threads end at once, RATE of them a second
 *   spawn reuse          two busy processes of one name, one after the other, with the same pid
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

static double now(void) {
    struct timespec at;
    clock_gettime(CLOCK_MONOTONIC, &at);
    return at.tv_sec + at.tv_nsec / 1e9;
}

static int over(int milliseconds) {
    struct pollfd input = {.fd = 0, .events = POLLIN};
    char byte;
    return poll(&input, 1, milliseconds) > 0 && read(0, &byte, 1) == 0;
}

static void burn(double seconds) {
    for (double end = now() + seconds; now() < end;) continue;
}

static void *burn_a_little(void *unused) {
    burn(0.0001);
    return unused;
}

/* So many are made at a time: to wait for each by itself takes longer than it lives. */
enum { BATCH = 16 };

static int processes(void) {
    int made = 0;
    for (int i = 0; i < BATCH; i++) {
        pid_t pid = fork();
        if (pid == 0) {
            burn(0.0001);
            _exit(0);
        }
        made += pid > 0;
    }
    while (waitpid(-1, NULL, 0) > 0) continue;
    return made;
}

static int threads(void) {
    pthread_t thread[BATCH];
    int made = 0;
    while (made < BATCH && !pthread_create(&thread[made], NULL, burn_a_little, NULL)) made++;
    for (int i = 0; i < made; i++) pthread_join(thread[i], NULL);
    return made;
}

static void many(int (*some)(void), double rate) {
    double began = now();
    long made = 0;
    do {
        while (made < (now() - began) * rate && !over(0)) made += some();
    } while (!over(1));
    printf("%.0f\n", made / (now() - began));
}

/* A child that burns, with this pid if it is not 0; its pid. */
static pid_t burner(pid_t wanted, double seconds) {
    if (wanted) {
        char text[16];
        int file = open("/proc/sys/kernel/ns_last_pid", O_WRONLY);
        int length = snprintf(text, sizeof text, "%d", wanted - 1);
        if (file < 0 || write(file, text, length) != length) return -1;
        close(file);
    }
    pid_t pid = fork();
    if (pid == 0) {
        if (wanted && getpid() != wanted) _exit(1);
        burn(seconds);
        _exit(0);
    }
    return pid;
}

static void reuse(void) {
    pid_t first = burner(0, 3), again;
    waitpid(first, NULL, 0);
    for (int tries = 0; tries < 10000; tries++) {
        again = burner(first, 3);
        if (again < 0) break;
        waitpid(again, NULL, 0);
        if (again == first) {
            printf("%d\n", first);
            return;
        }
    }
    printf("0\n");
}

int main(int argc, char **argv) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    /* Where this may be had: to be so many is the point, however busy the machine is. */
    if (setpriority(PRIO_PROCESS, 0, -15)) fputs("at ordinary priority\n", stderr);
    if (argc == 3 && !strcmp(argv[1], "short")) many(processes, atof(argv[2]));
    else if (argc == 3 && !strcmp(argv[1], "threads")) many(threads, atof(argv[2]));
    else if (argc == 2 && !strcmp(argv[1], "reuse")) reuse();
    else return 2;
    return 0;
}
