/* engine_exchange.c - exchanges are shown to a device whose memory is not the host's, and what it does not reach is told. */
#include <stdio.h>
#include <string.h>

#include "gpu-worker/engine_private.h"

static size_t show(void *context, void *memory, size_t n_bytes)
{
    const struct network *network = context;
    return network->ops->device->show(network->backend, memory, n_bytes);
}

static void hide(void *context, void *memory, size_t n_bytes)
{
    const struct network *network = context;
    network->ops->device->hide(network->backend, memory, n_bytes);
}

void engine_exchange_init(struct engine *engine)
{
    if (engine->network->ops->device != NULL)
        engine->stores.device = (struct stores_device){.show = show, .hide = hide, .context = engine->network};
}

void engine_exchange_made(struct engine *engine, uint32_t number)
{
    const double mib = 1 << 20;
    const struct store *store = stores_get(&engine->stores, number);
    if (engine->stores.device.show == NULL || store->shown_bytes == store->exchange.n_bytes)
        return;
    struct engine_event *event = engine_new_event(engine, ENGINE_WARNING, NULL);
    char text[160];
    snprintf(text, sizeof(text),
             "store %u: %.0f of %.0f MiB of the exchange could be registered with the device; the rest is copied",
             number, (double)store->shown_bytes / mib, (double)store->exchange.n_bytes / mib);
    if (event != NULL)
        event->text = strdup(text);
    engine_tell(engine, event);
}
