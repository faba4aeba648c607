"""The MoE block: router, experts, their composition, and the balance of the experts' load."""
