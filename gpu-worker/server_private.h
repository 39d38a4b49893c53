/* server_private.h - shared by server.c, server_control.c and server_work.c only. */
#pragma once

#include <stdbool.h>

#include "common/socket.h"
#include "gpu-worker/server.h"
#include "proto/work.pb-c.h"

struct server {
    const struct server_options *options;
    struct engine *engine;
    struct socket_context *sockets;
    const struct model *model;
    const struct tokenizer *tokenizer;
    const struct chat *chat;
    const char *chat_error;
    int peer_fd; /* -1: no coordinator */
    bool is_welcome;
    bool is_refused;
    bool has_lost_device;
    bool is_leaving;     /* it is us who hang up */
    bool is_stuck;       /* a reply did not go out: the connection is given up */
    struct socket *work; /* DEALER */
    uint64_t data_route, work_route;
    uint32_t epoch;
    uint64_t lost_us; /* since when there is no coordinator */
};

/* server_control.c: the peer socket. */
int server_control_hello(struct server *server);
/* Reads what has come; -EPIPE: the coordinator hung up. */
int server_control_receive(struct server *server);
int server_control_heartbeat(struct server *server);
void server_control_ring_used(struct server *server, const struct engine_event *event);
void server_control_exchange(struct server *server, const struct engine_event *event);

/* server_work.c: the work socket. */
void server_work_receive(struct server *server);
void server_work_event(struct server *server, struct engine_event *event); /* event stays the caller's */
void server_work_reply(struct server *server, const Hcattn__Work__WorkReply *reply);
void server_work_error(struct server *server, uint64_t work, int error, const char *sentence);

/* server_jobs.c */
void server_jobs_take(struct server *server, uint64_t work, const Hcattn__RunJob *message);
void server_jobs_event(struct server *server, const struct engine_event *event);
