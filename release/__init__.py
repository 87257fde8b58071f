"""What a release is made of and how it is checked: locked versions, inventories, audits and signatures."""
