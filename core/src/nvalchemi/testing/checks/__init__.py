"""The checks of the conformance kit, a file a subject; `HookConformance` has them all."""
