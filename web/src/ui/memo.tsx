import { Component, type ComponentType, type VNode } from "preact";

/** Return a component that is drawn again only if a property has changed. */
export function memo<P extends object>(inner: ComponentType<P>): ComponentType<P> {
  const Inner = inner as ComponentType<object>;
  return class extends Component<P> {
    override shouldComponentUpdate(next: Readonly<P>): boolean {
      const now = this.props as Record<string, unknown>;
      return Object.entries(next).some(([name, value]) => now[name] !== value);
    }

    override render(): VNode {
      return <Inner {...this.props} />;
    }
  };
}
