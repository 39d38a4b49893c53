/*
 * topology_pci.c - the node of a PCI device, out of the kernel's folder of devices. hwloc would tell the same after a look at every
 * device of the machine, and attaches one whose node is forbidden to us to those that are not.
 */
#include "common/topology.h"

#include <errno.h>
#include <stdio.h>
#include <unistd.h>

/* -ENODEV: no such device; -1 in ret_node: the kernel does not know. */
static int read_node(const char *folder, const char *address, long *ret_node)
{
    unsigned domain, bus, device, function;
    char path[512], rest;
    long node = -1;
    if (sscanf(address, "%8x:%2x:%2x.%1x%c", &domain, &bus, &device, &function, &rest) != 4)
        return -EINVAL;
    int n = snprintf(path, sizeof(path), "%s/%04x:%02x:%02x.%x", folder, domain, bus, device, function);
    if (n < 0 || (size_t)n + sizeof("/numa_node") > sizeof(path))
        return -EINVAL;
    if (access(path, F_OK) < 0)
        return -ENODEV;
    snprintf(path + n, sizeof(path) - (size_t)n, "/numa_node");
    FILE *file = fopen(path, "re"); /* a kernel without NUMA does not have it */
    if (file && fscanf(file, "%ld", &node) != 1)
        node = -1;
    if (file)
        fclose(file);
    *ret_node = node;
    return 0;
}

int topology_node_of_pci_in(const struct topology *topology, const char *folder, const char *address,
                            uint32_t *ret_index)
{
    long node;
    struct topology_node only;
    int error = read_node(folder, address, &node);
    if (error)
        return error;
    if (node >= 0)
        return node <= UINT32_MAX && topology_find(topology, (uint32_t)node, ret_index) == 0 ? 0 : -EACCES;
    /* One that we may use, of a machine that can have others with cpus for us. */
    if (topology_n_nodes(topology) > 1 || topology_node(topology, 0, &only) < 0 ||
        only.n_cpus < topology_n_allowed_cpus(topology))
        return -ENODATA;
    *ret_index = 0;
    return 0;
}

int topology_node_of_pci(const struct topology *topology, const char *address, uint32_t *ret_index)
{
    return topology_node_of_pci_in(topology, "/sys/bus/pci/devices", address, ret_index);
}
