/*
 * exit_status.h - how processes of the service end, for who started them.
 *
 * A process that left was told to by the coordinator: its supervisor does not start it again until it is asked to.
 */
#pragma once

#define EXIT_STATUS_OK      0
#define EXIT_STATUS_FAILED  1 /* trying again may help */
#define EXIT_STATUS_REFUSED 2 /* a bad option or model, or the coordinator refused it: trying again does not help */
#define EXIT_STATUS_LEFT    3
