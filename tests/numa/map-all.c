/*
 * map-all.c - map-all FILE...: maps each file shared and read-only with all of its pages, and copies the lines that
 * /proc/self/numa_maps has for these mappings. So a test sees where every page of a segment lies, also of those that its
 * owner has not touched.
 */
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

int main(int argc, char **argv)
{
    for (int i = 1; i < argc; i++) {
        struct stat status;
        int fd = open(argv[i], O_RDONLY | O_CLOEXEC);
        if (fd < 0 || fstat(fd, &status) < 0 || status.st_size <= 0 ||
            mmap(NULL, (size_t)status.st_size, PROT_READ, MAP_SHARED | MAP_POPULATE, fd, 0) == MAP_FAILED) {
            perror(argv[i]);
            return 1;
        }
        close(fd);
    }
    FILE *maps = fopen("/proc/self/numa_maps", "re");
    if (maps == NULL) {
        perror("/proc/self/numa_maps");
        return 1;
    }
    char line[4096];
    while (fgets(line, sizeof(line), maps) != NULL) {
        if (strstr(line, "memfd:") != NULL)
            fputs(line, stdout);
    }
    fclose(maps);
    return 0;
}
