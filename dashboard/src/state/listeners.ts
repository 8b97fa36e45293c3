/** Functions that are called when something has changed. */

export class Listeners {
  private readonly all = new Set<() => void>();

  get size(): number {
    return this.all.size;
  }

  /** Adds a listener; returns a function that takes it away. */
  subscribe = (listener: () => void): (() => void) => {
    this.all.add(listener);
    return () => void this.all.delete(listener);
  };

  notify = (): void => this.all.forEach((listener) => listener());
}
