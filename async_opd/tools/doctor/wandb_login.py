"""Whether metrics would reach wandb."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from async_opd.config.run_config import RunConfig
from async_opd.tools.doctor.finding import Finding

TOPIC = "wandb"
REMEDY = "wandb login, or export WANDB_API_KEY; wandb sync sends an offline run later"


def wandb_login(config: RunConfig, mode: Callable[[], str] | None = None) -> Iterator[Finding]:
    """A line for ``log.wandb``. ``mode``: what wandb's own settings say; it asks no server."""
    wanted = config.log.wandb
    if wanted in ("off", "offline"):
        yield Finding(TOPIC, "ok", f"log.wandb is {wanted}")
        return
    from async_opd.observability.wandb_sink import own_mode

    found = (mode or own_mode)()
    if found == "online":
        yield Finding(
            TOPIC, "ok", f"a login was found: the run logs to project {config.log.project}"
        )
    elif wanted == "online":
        message = f"log.wandb is online, but wandb's own settings give {found}: there is no login"
        yield Finding(TOPIC, "warning", message, REMEDY)
    else:
        yield Finding(TOPIC, "warning", f"the run would be {found}: there is no login", REMEDY)
