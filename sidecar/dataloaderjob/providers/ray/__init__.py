"""The provider that runs feeders as actors of a Ray cluster. No other provider imports ray. The module `node` of this
package does not import it either."""
