"""The stages of a training step, and the loop that they are taken from."""

from __future__ import annotations

from enum import Enum, auto

__all__ = ["TrainingStage"]


class TrainingStage(Enum):
    """A moment of training at which hooks are called.

    The whole loop, with every stage where it is dispatched::

        settle devices                     # models and batches have their place
        SETUP                              # plain hooks (they may wrap models), then update hooks
        build optimizers and schedulers    # once; a second run goes on with them
        BEFORE_TRAINING
        for each epoch:
            BEFORE_EPOCH
            for each batch:
                BEFORE_BATCH               # gradients are zeroed, unless an update hook vetoes
                BEFORE_FORWARD
                predictions = training_fn(model, batch)
                AFTER_FORWARD
                BEFORE_LOSS
                loss = loss_fn(predictions, batch)
                AFTER_LOSS
                BEFORE_BACKWARD
                DO_BACKWARD                # slot: update hooks transform the loss, then backward() once
                AFTER_BACKWARD
                BEFORE_OPTIMIZER_STEP
                DO_OPTIMIZER_STEP          # slot: update hooks vote; optimizers, schedulers, scaler
                AFTER_OPTIMIZER_STEP       # also after a veto: ctx.step_skipped tells
                step_count += 1            # only if an optimizer stepped
                AFTER_BATCH
            AFTER_EPOCH
        AFTER_TRAINING

        AFTER_VALIDATION                   # an event: whenever a validation has ended

    Two stages are slots with at most one owner: ``DO_BACKWARD`` and ``DO_OPTIMIZER_STEP``.

    Examples
    --------
    >>> [stage.name for stage in TrainingStage][:3]
    ['SETUP', 'BEFORE_TRAINING', 'BEFORE_EPOCH']
    """

    SETUP = auto()  #: devices are settled, optimizers are not built: the only place to replace a model
    BEFORE_TRAINING = auto()  #: once a run, before its first epoch
    BEFORE_EPOCH = auto()  #: the epoch's number is set, its counters are zero
    BEFORE_BATCH = auto()  #: the batch is on its device; contexts opened here close when the batch ends
    BEFORE_FORWARD = auto()  #: gradients are zero, or kept on request
    AFTER_FORWARD = auto()  #: predictions exist, no loss yet
    BEFORE_LOSS = auto()  #: ``ctx.loss`` is still None
    AFTER_LOSS = auto()  #: ``ctx.loss`` is live: it carries the graph
    BEFORE_BACKWARD = auto()  #: the last moment before the loss is transformed
    DO_BACKWARD = auto()  #: slot; its owner runs ``backward()`` exactly once
    AFTER_BACKWARD = auto()  #: ``ctx.loss`` is detached and untransformed; ``.grad`` may carry the loss scale
    BEFORE_OPTIMIZER_STEP = auto()  #: ``ctx.gradients`` and ``ctx.grad_norm`` are true
    DO_OPTIMIZER_STEP = auto()  #: slot; its owner steps optimizers, schedulers and scaler, or none
    AFTER_OPTIMIZER_STEP = auto()  #: ``ctx.step_skipped`` is known; ``ctx.step_count`` does not hold this step yet
    AFTER_BATCH = auto()  #: counters hold this batch
    AFTER_EPOCH = auto()  #: the pass over the loader is over
    AFTER_TRAINING = auto()  #: once a run, after its last epoch
    AFTER_VALIDATION = auto()  #: an event, no place in the loop: ``ctx.validation`` holds the result

    # Members are singletons, so identity is a sound hash; Enum's own hashes the name at every lookup.
    __hash__ = object.__hash__
