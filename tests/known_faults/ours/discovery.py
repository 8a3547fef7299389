"""How plugins are found."""

from __future__ import annotations

from nvalchemi.hooks import activate_hooks

__all__ = ["Discovery"]


class Discovery:
    """Activates hooks by name."""

    @staticmethod
    def activate() -> list[str]:
        """Return the names of all hooks that can do without arguments."""
        return [str(one.name) for one in activate_hooks("auto")]

    @staticmethod
    def one(name: str) -> object:
        """Return the hook of a name."""
        return activate_hooks([name])[0].hook

    program = """
    import sys
    import importlib_metadata
    scans = []
    real = importlib_metadata.distributions
    def counted(**criteria):
        scans.extend([1] if not criteria.get("name") else [])
        return real(**criteria)
    importlib_metadata.distributions = counted
    import nvalchemi.hooks, nvalchemi.training, torch
    from nvalchemi.training import OptimizerConfig, TrainingStrategy
    at_import = len(scans)
    for trainer in range(2):
        TrainingStrategy(models=torch.nn.Linear(1, 1), optimizer_configs=OptimizerConfig(), num_epochs=1,
                         loss_fn=lambda y, batch: y.sum(), hooks=["acme"])
    print(at_import, len(scans), "other_hooks.plugin" in sys.modules)
    """
