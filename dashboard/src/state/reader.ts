/** Reads again when a newer version is wanted, one read at a time. */

export class Reader {
  private wanted: string | null = null;
  private running = false;

  /** `read` handles its own errors. It gets called once for each version that is the newest when a read begins. */
  constructor(private readonly read: () => Promise<void>) {}

  /** Reads, unless this version is the last one that was asked for. */
  async want(version: string): Promise<void> {
    if (this.wanted === version) return;
    this.wanted = version;
    if (this.running) return;
    this.running = true;
    for (let done: string | null = null; done !== this.wanted; ) {
      done = this.wanted;
      await this.read();
    }
    this.running = false;
  }
}
