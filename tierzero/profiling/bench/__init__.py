"""What this machine gives: drives, the Adam kernel, copies, computation and collectives, each as the runtime uses
them."""
