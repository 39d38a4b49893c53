/*
 * client_keys.h - which clients may connect over TCP: those whose public keys stand in a file.
 *
 * Owner      server.c; its thread. Clients on client.sock need no key: the directory is their user's.
 * Invariant  a client is judged by the file as it is when it connects; one that cannot be read or has a mistake changes nothing.
 */
#pragma once

#include "common/socket.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define CLIENT_KEYS_ERROR_BYTES 512

struct client_keys;

/* Reads both files and opens the gate in `context`; before anything with keys is bound there. Errors with a sentence. The paths
 * must outlive it. */
int client_keys_new(struct socket_context *context, const char *secret_path, const char *clients_path,
                    char error[CLIENT_KEYS_ERROR_BYTES], struct client_keys **ret_client_keys);
struct client_keys *client_keys_free(struct client_keys *client_keys); /* accepts NULL, returns NULL */

/* What `socket` is bound to from then on serves only clients that are admitted. */
int client_keys_guard(const struct client_keys *client_keys, struct socket *socket);

struct socket *client_keys_socket(const struct client_keys *client_keys); /* to wait for; NULL for NULL */
void client_keys_decide(struct client_keys *client_keys);                 /* for all clients that wait */

size_t client_keys_count(const struct client_keys *client_keys);
