/* turn.c - see turn.h. */
#include "value-store/turn.h"

void turn_init(struct turn *turn)
{
    pthread_mutex_init(&turn->lock, NULL);
    pthread_cond_init(&turn->next, NULL);
    turn->n_asked = turn->n_ended = 0;
}

void turn_fini(struct turn *turn)
{
    pthread_cond_destroy(&turn->next);
    pthread_mutex_destroy(&turn->lock);
}

void turn_take(struct turn *turn)
{
    pthread_mutex_lock(&turn->lock);
    uint64_t own = turn->n_asked++;
    while (turn->n_ended != own)
        pthread_cond_wait(&turn->next, &turn->lock);
    pthread_mutex_unlock(&turn->lock);
}

void turn_end(struct turn *turn)
{
    pthread_mutex_lock(&turn->lock);
    turn->n_ended++;
    if (turn->n_ended != turn->n_asked)
        pthread_cond_broadcast(&turn->next);
    pthread_mutex_unlock(&turn->lock);
}
